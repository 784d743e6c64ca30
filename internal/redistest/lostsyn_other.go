//go:build !linux

package redistest

import (
	"errors"
	"net"
)

// shortenQueue does nothing: elsewhere a full queue may refuse connects.
func shortenQueue(*net.TCPListener) error { return errors.New("only Linux has them") }
