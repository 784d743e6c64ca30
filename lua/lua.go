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

// code returns the script of that name, after a line that names it to an operator.
func code(name string) string {
	return fmt.Sprintf("-- flightlock, lua/%s.lua\n", name) + part(name)
}

// part returns the text of that name with the parts that it includes, without comments, indentation and blank
// lines: those are more than half of the text, which is sent to each node. So no string in a script has " --
// " in it.
func part(name string) string {
	text, err := files.ReadFile(name + ".lua")
	if err != nil {
		panic(err) // the files are part of the binary
	}
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if included, ok := strings.CutPrefix(line, "-- include "); ok {
			b.WriteString(part(strings.TrimSuffix(included, ".lua")))
			continue
		}
		if line, _, _ = strings.Cut(line, " -- "); line != "" && !strings.HasPrefix(line, "--") {
			b.WriteString(line + "\n")
		}
	}
	return b.String()
}

// Script is a script and the name under which a server caches it.
type Script struct {
	Source string
	SHA    string // hex SHA-1 of Source, as EVALSHA wants it
}

// The scripts of the lock protocol that cast no vote: they keep and end what is held. Done is the release of
// a lock for which nobody waits.
var (
	Refresh = newScript(code("refresh"))
	Done    = newScript(code("done"))
	Undo    = newScript(code("undo"))
)

// Those that vote: for nodes without epochs, and for clients that may not see which process it is. For others
// see In.
var (
	Acquire = newScript(code("acquire"))
	Release = newScript(code("release"))
	Attach  = newScript(code("attach"))
)

// Those of read leases, one for each of the scripts above: see readers.lua. The first two vote.
var (
	SharedAcquire = newScript(code("rlock"))
	SharedRelease = newScript(leaving("release", 4))
	SharedRefresh = newScript(code("rrefresh"))
	SharedDone    = newScript(leaving("done", 1))
	SharedUndo    = newScript(leaving("undo", 1))
)

// In is the script for that process only, as boot.lua reports it; "" is any. It may be loaded only after
// boot.lua's reply, on the same connection: so no other process knows it. (Before Redis 7 scripts outlive
// their process, so the process is compared as well: see Epoch.) A process has one text of it, whatever
// becomes of its data, and however many clients there are.
func (s Script) In(process string) Script {
	if process == "" {
		return s
	}
	return newScript("-- process " + process + "\n" + s.Source)
}

// leaving returns the script of that name for a read lease: see leave.lua. owner says which argument is the
// owner.
func leaving(name string, owner int) string {
	head := fmt.Sprintf("-- flightlock, lua/leave.lua, %s.lua\nlocal owner = ARGV[%d]\n", name, owner)
	return head + part("leave") + part(name)
}

// An Epoch is what acquire and release have to know of a node's epoch, as boot.lua has reported it.
type Epoch struct {
	Name      string // "": whatever the marker is
	Run       string // the process; "" if boot.lua could not see it
	AlwaysRun bool   // the process is always compared, not only in a strict check
	Raw       bool   // the marker is raw, unless it was read from a dump
	Promoted  string // when the process was last promoted, id:offset, "-" if never; "" if that is not known
	Since     int64  // when the epoch began: tokens that are granted in it are larger
}

// GrantNothing are the first three arguments of a release that makes a turn of the key instead of granting it
// to the next contender: it needs no proof of the node's epoch.
var GrantNothing = [3]string{"!", "0", ""}

// Args are the first three arguments of acquire and release (see epoch.lua). With strict, they make the
// strict check.
func (e Epoch) Args(strict bool) [3]string {
	raw, run, promoted, offset := "-", "-", "-", "-"
	if strict && e.Raw && e.Name != "" {
		raw = "raw"
	}
	if e.Run != "" && (strict || e.AlwaysRun && e.Name != "") {
		run = e.Run
	}
	if e.Promoted == "-" && strict {
		promoted, offset = "never", "never" // which INFO does not say
	} else if e.Promoted != "" && strict {
		promoted, offset, _ = strings.Cut(e.Promoted, ":")
	}
	check := strings.Join([]string{raw, run, promoted, offset}, " ")
	if check == "- - - -" {
		check = ""
	}
	return [3]string{e.Name, strconv.FormatInt(e.Since, 10), check}
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
	Boot    = newScript(code("boot"))
	Check   = newScript(code("check"))
	Inspect = newScript(code("inspect"))
	Sets    = newScript(code("sets"))
	Slots   = newScript(code("slots"))
)

// All lists the scripts of the lock protocol for nodes without epochs, but for those of read leases.
var All = []Script{Acquire, Release, Attach, Refresh, Done, Undo}

func newScript(source string) Script {
	sum := sha1.Sum([]byte(source))
	return Script{Source: source, SHA: hex.EncodeToString(sum[:])}
}
