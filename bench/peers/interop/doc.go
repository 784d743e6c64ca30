// Package interop has no code but tests: flightlock with NoPrefix and other Redlock clients on the
// same nodes and keys exclude each other.
package interop
