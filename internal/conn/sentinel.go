package conn

import (
	"context"
	"errors"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"
)

const (
	// FailoverAddr is what go-redis calls the address of every Sentinel-managed master.
	FailoverAddr = "FailoverClient"

	// SentinelAddr begins what Open calls it.
	SentinelAddr = "Sentinel master "
)

// IsSentinelManaged reports whether Sentinels name the server of a client with these options.
func IsSentinelManaged(o *redis.Options) bool {
	return o.Addr == FailoverAddr || strings.HasPrefix(o.Addr, SentinelAddr)
}

// MasterAddr returns which master the Sentinels of such a client name. Only its dialer knows them: it asks,
// and then dials. So it is to dial a socket of that name, which is no file: the error contains the address,
// and nothing was sent to it. A dialer of the user's below it may dial it all the same, or say in other words
// than package net that it does not, as those for SOCKS proxies do.
func MasterAddr(ctx context.Context, o *redis.Options) (string, error) {
	conn, err := o.Dialer(ctx, "unix", o.Addr)
	if err == nil {
		defer conn.Close()
		if addr := conn.RemoteAddr(); addr != nil {
			return addr.String(), nil
		}
		return "", errNoAddr
	}
	var failed *net.OpError
	if errors.As(err, &failed) && failed.Net == "unix" && failed.Addr != nil {
		return failed.Addr.String(), nil
	}
	return "", err
}

var errNoAddr = errors.New("the connection to the master does not know where it leads to")
