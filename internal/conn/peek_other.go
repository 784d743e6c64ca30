//go:build !unix

package conn

import "syscall"

// unread reports whether the socket has unread bytes. On this system that cannot be determined.
func unread(syscall.Conn) bool { return false }

// canPeek reports whether one can look into a socket.
func canPeek(syscall.Conn) bool { return false }

// quiet is Quiet of a socket. On this system that cannot be determined.
func quiet(syscall.RawConn) bool { return true }
