//go:build unix

package node

import "syscall"

// waits reports whether bytes that were received wait to be read. It does not wait for whoever reads.
func waits(c syscall.Conn) bool {
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
