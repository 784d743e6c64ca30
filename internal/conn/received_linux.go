package conn

import (
	"net"

	"golang.org/x/sys/unix"
)

// received returns how many bytes have arrived on c, read or not, as the kernel counts them. A Read
// that is blocked does not block it.
func received(c *net.TCPConn) (n uint64, ok bool) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, false
	}
	err = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n, ok = info.Bytes_received, info.Bytes_received > 0 // older kernels leave it 0
		}
	})
	return n, ok && err == nil
}
