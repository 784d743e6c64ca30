package rediscache

import (
	"strconv"
	"time"
	"unsafe"
)

// An entry is what Redis has at a key: one string, which is a header and, unless it is a tombstone or a
// remembered "not found", the encoded value.
//
//	fl1:  kind  stamp          fresh until    expires        load took     value
//	      t     32 characters
//	      n     32 characters  16 digits      16 digits      10 digits
//	      v     32 characters  16 digits      16 digits      10 digits     the rest
//	      r     the same: a value that is marked, so that the next who may load it does, though it may be fresh
//
// Times are the server's, in microseconds. A stamp is the server's time when it was made, and 64 random bits,
// of which a mark changes the last 32. The header has a fixed length, so that scripts need no parser, and it
// is text, so that redis-cli shows it.
//
// The ttl of the key may be longer than that of the entry, because a lookup before a load prolongs it: the
// load needs the stamp when it is done. So the header says when the entry expires.
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
	marked    = 'r'

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

// parseEntry reads a header. ok is false if x is no entry of this package. Neither the stamp nor the value is
// copied.
func parseEntry(x string) (e entry, ok bool) {
	if len(x) < freshAt || x[:len(magic)] != magic {
		return e, false
	}
	e.kind, e.stamp = x[kindAt], x[stampAt:freshAt]
	switch {
	case e.kind == tombstone:
		return e, true
	case e.kind != absent && e.kind != present && e.kind != marked, len(x) < payloadAt:
		return e, false
	}
	var okFresh, okExpires bool
	e.fresh, okFresh = digits(x[freshAt:expiresAt])
	e.expires, okExpires = digits(x[expiresAt:tookAt])
	took, okTook := digits(x[tookAt:payloadAt])
	e.took = time.Duration(took) * time.Microsecond
	e.payload = unsafe.Slice(unsafe.StringData(x), len(x))[payloadAt:] // as go-redis does: nobody changes it
	return e, okFresh && okExpires && okTook
}

// madeAt is the server's time at which an entry with that stamp was made, in microseconds.
func madeAt(stamp string) (at int64, ok bool) { return digits(stamp[:timeLen]) }

// digits is the number that s says in decimal digits.
func digits(s string) (n int64, ok bool) {
	u, err := strconv.ParseUint(s, 10, 63)
	return int64(u), err == nil
}

// millis is d as a ttl.
func millis(d time.Duration) int64 { return max(d.Milliseconds(), 1) }
