// Package lua holds the scripts that run on the Redis nodes. Each .lua file documents
// its KEYS, ARGV and every reply. The package is a leaf: it knows nothing of the
// client, and there is no promise of compatibility for it.
package lua

import (
	"crypto/sha1"
	_ "embed" // the scripts are part of the binary
	"encoding/hex"
)

//go:embed acquire.lua
var acquire string

//go:embed refresh.lua
var refresh string

//go:embed release.lua
var release string

//go:embed check.lua
var check string

//go:embed sets.lua
var sets string

// Script is a script and the name under which a server caches it.
type Script struct {
	Source string
	SHA    string // hex SHA-1 of Source, as EVALSHA wants it
}

// The scripts of the lock protocol.
var (
	Acquire = newScript(acquire)
	Refresh = newScript(refresh)
	Release = newScript(release)
)

// The scripts beside it, which no lock waits for.
var (
	Check = newScript(check)
	Sets  = newScript(sets)
)

// All lists the scripts of the lock protocol, for loading a server's cache in one go.
var All = []Script{Acquire, Refresh, Release}

func newScript(source string) Script {
	sum := sha1.Sum([]byte(source))
	return Script{Source: source, SHA: hex.EncodeToString(sum[:])}
}
