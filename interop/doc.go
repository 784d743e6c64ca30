// Package interop has no code: its tests show that flightlock with NoPrefix and other
// Redlock clients on the same nodes and keys exclude each other. It is a module of its own,
// so that the library does not depend on those clients.
package interop
