// Package lua holds the scripts that run on the Redis nodes. Each .lua file documents
// its KEYS, ARGV and every reply. The package is a leaf: it knows nothing of the
// client, and there is no promise of compatibility for it.
package lua

import (
	"crypto/sha1"
	"embed"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

//go:embed *.lua
var files embed.FS

// The texts of the scripts, without their comments.
var (
	acquire = code("acquire")
	refresh = code("refresh")
	release = code("release")
	undo    = code("undo")
	boot    = code("boot")
	check   = code("check")
	sets    = code("sets")

	undeclared = code("undeclared")
)

// code returns the script of that name, after a line that names it to an operator.
func code(name string) string {
	return fmt.Sprintf("-- %s: a script of flightlock, see lua/%[1]s.lua\n", name) + part(name)
}

// part returns the text of that name with the parts that it includes, and without the lines that are
// comments: those are half of the text, which each client sends to each node when it starts.
func part(name string) string {
	text, err := files.ReadFile(name + ".lua")
	if err != nil {
		panic(err) // the files are part of the binary
	}
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		rest := strings.TrimSpace(line)
		if included, ok := strings.CutPrefix(rest, "-- include "); ok {
			b.WriteString(part(strings.TrimSuffix(included, ".lua")))
		} else if !strings.HasPrefix(rest, "--") {
			b.WriteString(line)
		}
	}
	return b.String()
}

// Script is a script and the name under which a server caches it.
type Script struct {
	Source string
	SHA    string // hex SHA-1 of Source, as EVALSHA wants it
}

// The scripts of the lock protocol. Acquire and Release are for nodes without epochs.
// GrantNothing is a release that makes a turn of the key instead of granting it to the next
// contender: it needs no proof of the node's epoch.
var (
	Acquire      = newScript(anyEpoch + acquire)
	Refresh      = newScript(refresh)
	Release      = newScript(anyEpoch + release)
	GrantNothing = newScript(noEpoch + release)
	Undo         = newScript(undo)
)

// anyEpoch stands before acquire and release where the epoch does not matter, noEpoch where it is not
// known.
const (
	anyEpoch = "local epoch, raw, run, promoted, offset, floor, name = false, false, false, false, false, 0, '-'\n"
	noEpoch  = "local epoch, raw, run, promoted, offset, floor, name = false, false, false, false, false, 0, false\n"
)

// An Epoch is what acquire has to know of a node's epoch, as boot.lua has reported it.
type Epoch struct {
	Name      string
	Run       string // the process; "" if boot.lua could not see it
	AlwaysRun bool   // the script always compares the process, not only in a strict check
	Raw       bool   // the marker is raw, unless it was read from a dump
	Promoted  string // when the process was last promoted, id:offset; "" if that is not known
	Since     int64  // when the epoch began: tokens that are granted in it are larger
	Strict    bool   // the script checks for a dump, for the process, and when it was last promoted
	// AnyMarker: it grants whatever the marker is. Its tokens are above the beginning of this epoch, if the process
	// is that of boot.lua's reply.
	AnyMarker bool
}

// AcquireIn is Acquire for a node in that epoch: it grants nothing in another. It may be loaded only
// after a reply of boot.lua that named this epoch, on the same connection: then a server that restarted
// does not know it, or has another marker. One that continues, but was another's replica meanwhile,
// knows it: a strict check finds that.
//
// A client that may not see the process, or may not ask whether the marker is raw, does not notice all
// losses. So it has a script of its own, which no client that sees more takes for a proof. A client that
// may not see the process checks for a dump each time, and in a strict check whether it may see the
// process by now.
func AcquireIn(e Epoch) Script { return newScript(e.head() + acquire) }

// ReleaseIn is Release for a node in that epoch: it grants nothing in another. The same holds for it.
func ReleaseIn(e Epoch) Script { return newScript(e.head() + release) }

// head is what stands before acquire and release.
func (e Epoch) head() string {
	epoch, raw, run, promoted, offset := strconv.Quote(e.Name), "nil", "nil", "false", "false"
	name := epoch
	switch {
	case e.AnyMarker:
		epoch, raw, name = "false", "false", "'-'"
	case e.Raw && (e.Strict || e.Run == ""):
		raw = "true"
	case e.Raw:
		raw = "false"
	}
	switch {
	case e.Strict || e.Run != "" && e.AlwaysRun && !e.AnyMarker:
		run = strconv.Quote(e.Run)
	case e.Run != "":
		run = "false"
	}
	if e.Promoted != "" && e.Strict {
		id, at, _ := strings.Cut(e.Promoted, ":")
		promoted, offset = strconv.Quote("master_replid2:"+id+"\r\n"), strconv.Quote("second_repl_offset:"+at+"\r\n")
	}
	return fmt.Sprintf("local epoch, raw, run, promoted, offset, floor, name = %s, %s, %s, %s, %s, %d, %s\n",
		epoch, raw, run, promoted, offset, e.Since, name)
}

// The keys of boot.lua.
const (
	Marker = "flightlock:{boot}"
	Past   = "flightlock:{boot}:past"
)

// MaxName is how long an epoch's name may be: a longer string is raw from a dump, too. Redis up
// to 8.0 draws that line at 44; later ones, and some of Valkey, count the key and more, and
// leave so much for the value.
const MaxName = 24

// The scripts beside it, which no lock waits for.
var (
	Boot  = newScript(boot)
	Check = newScript(check)
	Sets  = newScript(sets)

	Undeclared = newScript(undeclared)
)

// Voteless are the scripts that cast no vote, so that the epoch does not matter: they keep and end what
// is held.
var Voteless = []Script{Refresh, GrantNothing, Undo}

// All lists the scripts of the lock protocol, for loading a server's cache in one go.
var All = append([]Script{Acquire, Release}, Voteless...)

func newScript(source string) Script {
	sum := sha1.Sum([]byte(source))
	return Script{Source: source, SHA: hex.EncodeToString(sum[:])}
}
