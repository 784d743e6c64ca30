//go:build !linux

package node

import "net"

// received counts the bytes that came on c. Here that cannot be found out.
func received(*net.TCPConn) (n uint64, ok bool) { return 0, false }
