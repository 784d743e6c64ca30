package redistest

import (
	"net"
	"syscall"
)

// shortenQueue leaves room for one connection that is not accepted. A second listen(2) changes only that.
func shortenQueue(l *net.TCPListener) error {
	raw, err := l.SyscallConn()
	if err != nil {
		return err
	}
	var lerr error
	if err := raw.Control(func(fd uintptr) { lerr = syscall.Listen(int(fd), 0) }); err != nil {
		return err
	}
	return lerr
}
