package redistest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// StartSentinel starts a redis-server in Sentinel mode, with these lines of configuration
// ("sentinel monitor main 127.0.0.1 6379 1"), and ends it in the test's cleanup. It is as
// good as a machine's; its failovers take a second or more.
func StartSentinel(tb testing.TB, lines ...string) *Server {
	tb.Helper()
	// A Sentinel insists on a file, which it rewrites all the time.
	conf := filepath.Join(tb.TempDir(), "sentinel.conf")
	if err := os.WriteFile(conf, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		tb.Fatal(err)
	}
	return startServer(tb, conf, "--sentinel")
}

// Watch are the lines for a Sentinel that watches master under that name, takes it for dead
// after half a second, and needs no other Sentinel's consent.
func Watch(name string, master *Server) []string {
	return []string{
		fmt.Sprintf("sentinel monitor %s 127.0.0.1 %d 1", name, master.Port()),
		fmt.Sprintf("sentinel down-after-milliseconds %s 500", name),
		fmt.Sprintf("sentinel failover-timeout %s 3000", name),
	}
}
