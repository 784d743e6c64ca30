// Package servers tests what works on which kind of server: Redis and Valkey of several versions, other
// products, and proxies before them. table_test.go has a table of all kinds; docs/servers.md shows it.
package servers

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"go.uber.org/goleak"
)

// clusters are those that kinds of servers that are several stand before: each kind has a key prefix of its
// own.
var clusters = []*redistest.Shared[*redistest.Cluster]{
	redistest.SharedCluster(2), redistest.SharedCluster(2), redistest.SharedCluster(2),
}

func TestMain(m *testing.M) {
	redistest.SilenceRedis()
	testkit.Clocks.Install()
	code := m.Run()
	var err error
	for _, c := range clusters {
		err = errors.Join(err, c.Close())
	}
	err = errors.Join(err, goleak.Find())
	if err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}
