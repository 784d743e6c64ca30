//go:build !unix

package conn

import "syscall"

// waits reports whether bytes that were received wait to be read. Here that cannot be found out.
func unread(syscall.Conn) bool { return false }
