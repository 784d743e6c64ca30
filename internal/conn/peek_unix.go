//go:build unix

package conn

import "syscall"

// unread reports whether the socket has unread bytes.
func unread(c syscall.Conn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	n, _, err := peek(raw)
	return n > 0 && err == nil
}

// canPeek reports whether one can look into c's socket.
func canPeek(c syscall.Conn) bool {
	raw, err := c.SyscallConn()
	return err == nil && raw.Control(func(uintptr) {}) == nil
}

// quiet is Quiet of a socket.
func quiet(raw syscall.RawConn) bool {
	_, first, err := peek(raw)
	return first == push || err == syscall.EAGAIN || err == syscall.EWOULDBLOCK
}

// peek looks for a byte that waits in the socket. A Read that is blocked does not block it.
func peek(raw syscall.RawConn) (n int, first byte, err error) {
	closed := raw.Control(func(fd uintptr) {
		var b [1]byte
		n, _, err = syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		first = b[0]
	})
	if closed != nil {
		return 0, 0, closed
	}
	return n, first, err
}
