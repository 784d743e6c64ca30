// Package lua holds the scripts that run on the Redis nodes. Each .lua file documents
// its KEYS, ARGV and every reply. The package is a leaf: it knows nothing of the
// client, and there is no promise of compatibility for it.
package lua

import (
	"crypto/sha1"
	_ "embed" // the scripts are part of the binary
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

//go:embed acquire.lua
var acquire string

//go:embed refresh.lua
var refresh string

//go:embed release.lua
var release string

//go:embed batch.lua
var batch string

//go:embed boot.lua
var boot string

//go:embed check.lua
var check string

//go:embed sets.lua
var sets string

// Script is a script and the name under which a server caches it.
type Script struct {
	Source string
	SHA    string // hex SHA-1 of Source, as EVALSHA wants it
}

// The scripts of the lock protocol. Acquire is for nodes that are always trusted.
var (
	Acquire = newScript(anyMemory + acquire)
	Refresh = newScript(refresh)
	Release = newScript(release)
	Batch   = newBatch(anyMemory)
)

// The letters by which a batch tells its operations apart.
const (
	LetterAcquire = 'a'
	LetterRefresh = 'f'
	LetterRelease = 'r'
	LetterGroup   = 'g' // of releases
)

// anyMemory stands before acquire where the memory does not matter.
const anyMemory = "local memory, raw, run, promoted, offset, floor = false, false, false, false, false, 0\n"

// A Memory is what acquire has to know of a node's memory, as boot.lua has told it.
type Memory struct {
	Name     string
	Run      string // the process; "" if boot.lua was not told it
	Strict   bool   // the script always looks for the process, not only by the closer look
	Raw      bool   // the marker is raw, unless it was read from a dump
	Promoted string // when the process was last made a master, id:offset; "" if that is not told
	Since    int64  // when the memory began: tokens that are granted in it are larger
	Closer   bool   // the script looks for a dump, for the process, and when it was last made a master
	Always   bool   // it grants whatever the marker is; its tokens are above the beginning of this memory, if the process is that of boot.lua's answer
}

// AcquireIn is Acquire for a node with that memory: it grants nothing in another. A server may
// come to know it only behind an answer of boot.lua that named this memory, on the same
// connection: then a server that restarted does not know it, or has another marker. One that goes
// on, but was another's replica meanwhile, knows it: a closer look finds out.
//
// Who is not told the process, or may not ask whether the marker is raw, does not see all that is
// lost. So it has a script of its own, which nobody who sees more takes for a proof. Who is not told
// the process looks for a dump each time, and by a closer look whether it is told by now.
func AcquireIn(m Memory) Script { return newScript(m.head() + acquire) }

// BatchIn is Batch with that Acquire. What is said of one goes for the other.
func BatchIn(m Memory) Script { return newBatch(m.head()) }

// head is what stands before acquire.
func (m Memory) head() string {
	name, raw, run, promoted, offset := strconv.Quote(m.Name), "nil", "nil", "false", "false"
	switch {
	case m.Always:
		name, raw = "false", "false"
	case m.Raw && (m.Closer || m.Run == ""):
		raw = "true"
	case m.Raw:
		raw = "false"
	}
	switch {
	case m.Closer || m.Run != "" && m.Strict && !m.Always:
		run = strconv.Quote(m.Run)
	case m.Run != "":
		run = "false"
	}
	if m.Promoted != "" && m.Closer {
		id, at, _ := strings.Cut(m.Promoted, ":")
		promoted, offset = strconv.Quote("master_replid2:"+id+"\r\n"), strconv.Quote("second_repl_offset:"+at+"\r\n")
	}
	return fmt.Sprintf("local memory, raw, run, promoted, offset, floor = %s, %s, %s, %s, %s, %d\n", name, raw, run, promoted, offset, m.Since)
}

// The keys of boot.lua.
const (
	Marker = "flightlock:{boot}"
	Past   = "flightlock:{boot}:past"
)

// MaxName is how long a memory's name may be: a longer string is raw from a dump, too. Redis up
// to 8.0 draws that line at 44; later ones, and some of Valkey, count the key and more, and
// leave so much for the value.
const MaxName = 24

// The scripts beside it, which no lock waits for.
var (
	Boot  = newScript(boot)
	Check = newScript(check)
	Sets  = newScript(sets)
)

// All lists the scripts of the lock protocol, for loading a server's cache in one go.
var All = []Script{Acquire, Refresh, Release, Batch}

func newScript(source string) Script {
	sum := sha1.Sum([]byte(source))
	return Script{Source: source, SHA: hex.EncodeToString(sum[:])}
}

// newBatch puts the scripts, as they are, into the batch: what an operation does is
// written in one place. head is what stands before acquire.
func newBatch(head string) Script {
	var b strings.Builder
	b.WriteString("local redis = redis\nlocal operations, keysOf, valuesOf = {}, {}, {}\n" + head)
	for _, op := range []struct {
		letter byte
		source string
	}{{LetterAcquire, acquire}, {LetterRefresh, refresh}, {LetterRelease, release}} {
		fmt.Fprintf(&b, "do\nlocal KEYS, ARGV = {}, {}\nkeysOf[%[1]d], valuesOf[%[1]d] = KEYS, ARGV\noperations[%[1]d] = function()\n%[2]s\nend\nend\n", op.letter, op.source)
	}
	b.WriteString(batch)
	return newScript(b.String())
}
