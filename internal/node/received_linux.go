package node

import (
	"net"

	"golang.org/x/sys/unix"
)

// received counts the bytes that came on c, whether they were read or not. It does not wait for whoever reads.
func received(c *net.TCPConn) (n uint64, ok bool) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, false
	}
	err = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n, ok = info.Bytes_received, info.Bytes_received > 0 // an older kernel says 0
		}
	})
	return n, ok && err == nil
}
