package rediscache

import (
	"fmt"
	"strconv"
	"time"
	"unsafe"
)

// An entry is what Redis has at a key: one string, which is a header and, unless it is a tombstone or a remembered "not
// found", the encoded value.
//
//	fl1:  kind  stamp          fresh until    expires        load took     value
//	      t     32 characters
//	      n     32 characters  16 digits      16 digits      10 digits
//	      v     32 characters  16 digits      16 digits      10 digits     the rest
//
// Times are the server's, in microseconds. A stamp is the server's time when it was made, and 64 random bits. The
// header has a fixed length, so that scripts need no parser, and it is text, so that redis-cli shows it.
//
// The ttl of the key may be longer than that of the entry, because a lookup before a load prolongs it: the load needs
// the stamp when it is done. So the header says when the entry expires.
type entry struct {
	kind    byte
	stamp   string
	fresh   int64 // until when; microseconds of the server's clock
	expires int64
	took    time.Duration // the load
	payload []byte        // must not be changed
}

const (
	magic     = "fl1:"
	tombstone = 't'
	absent    = 'n'
	present   = 'v'

	kindAt     = len(magic)
	stampAt    = kindAt + 1
	stampLen   = 32
	freshAt    = stampAt + stampLen
	timeLen    = 16
	expiresAt  = freshAt + timeLen
	tookAt     = expiresAt + timeLen
	tookLen    = 10
	payloadAt  = tookAt + tookLen
	longestRun = 9_999_999_999 * time.Microsecond // what tookLen digits can say
)

// parseEntry reads a header. ok is false if x is no entry of this package. Neither the stamp nor the value is copied.
func parseEntry(x string) (e entry, ok bool) {
	if len(x) < freshAt || x[:len(magic)] != magic {
		return e, false
	}
	e.kind, e.stamp = x[kindAt], x[stampAt:freshAt]
	switch {
	case e.kind == tombstone:
		return e, true
	case e.kind != absent && e.kind != present, len(x) < payloadAt:
		return e, false
	}
	var took int64
	var okFresh, okExpires, okTook bool
	e.fresh, okFresh = digits(x[freshAt:expiresAt])
	e.expires, okExpires = digits(x[expiresAt:tookAt])
	took, okTook = digits(x[tookAt:payloadAt])
	e.took = time.Duration(took) * time.Microsecond
	e.payload = unsafe.Slice(unsafe.StringData(x), len(x))[payloadAt:] // as go-redis does: nobody changes it
	return e, okFresh && okExpires && okTook
}

// madeAt is the server's time at which an entry with that stamp was made, in microseconds.
func madeAt(stamp string) (at int64, ok bool) { return digits(stamp[:timeLen]) }

// digits is the number that s says in decimal digits, of which there are few enough.
func digits(s string) (n int64, ok bool) {
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = 10*n + int64(c-'0')
	}
	return n, true
}

// tookText is how a header says how long a load took.
func tookText(d time.Duration) string {
	return fmt.Sprintf("%0*d", tookLen, min(max(d, 0), longestRun).Microseconds())
}

func micros(d time.Duration) string { return strconv.FormatInt(d.Microseconds(), 10) }

func millis(d time.Duration) string { return strconv.FormatInt(max(d.Milliseconds(), 1), 10) }
