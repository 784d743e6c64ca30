//go:build unix

package conn

import "syscall"

// unread reports whether the socket has unread bytes. A Read that is blocked does not block it.
func unread(c syscall.Conn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	some := false
	err = raw.Control(func(fd uintptr) {
		var b [1]byte
		n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		some = n > 0 && err == nil
	})
	return some && err == nil
}

// quiet reports whether nothing waits in the socket: no bytes, no end of the stream, no error.
func quiet(raw syscall.RawConn) bool {
	nothing := false
	err := raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		nothing = err == syscall.EAGAIN || err == syscall.EWOULDBLOCK
	})
	return nothing && err == nil
}
