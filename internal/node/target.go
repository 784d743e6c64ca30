package node

import (
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/link"
)

// Reserved begins every key that flightlock keeps for itself on a node.
const Reserved = "flightlock:{"

// StartsWith reports whether prefix and key together begin with s, as Reserved.
func StartsWith(prefix, key, s string) bool {
	n := min(len(prefix), len(s))
	return prefix[:n] == s[:n] && strings.HasPrefix(key, s[n:])
}

// slots is the number of hash slots of a Redis Cluster.
const slots = 16384

// bucketsPerSlot bounds how many fence counters one hash slot may have, however many
// locks there are.
const bucketsPerSlot = 16

// Target is what one attempt is about, shared by the attempt's entries on all nodes. Init, Carry and Replace
// set it, before the first acquire. After that only begun changes.
type Target struct {
	key, owner string
	bucket     bucket
	contention *contention // nil if the attempt is made for no contender
	replaced   *Replaced   // the attempt attaches a detached lock; nil: it does not
	slot       uint16
	shared     bool // it is of a read lease: see lua/readers.lua

	mu    sync.Mutex // guards begun
	begun time.Time  // when the first acquire was about to be written; zero before that
}

// begin notes that an acquire is about to be written. What the attempt's lease is valid for counts
// from the first: as long as all of them wait in this process, no time passes for it.
func (t *Target) begin(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.begun.IsZero() {
		t.begun = now
	}
}

// Begun is when the first acquire was about to be written; zero before that.
func (t *Target) Begun() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.begun
}

// over reports whether the attempt has begun longer than ttl ago, so that it is of no use any more.
func (t *Target) over(ttl time.Duration) bool {
	begun := t.Begun()
	return !begun.IsZero() && clock.Passed(clock.Now(), begun.Add(ttl))
}

// Init sets what the attempt is for, and which hash slot and fence bucket key has. key has the
// prefix; owner is the whole stored value of this attempt; contender is the name under which this
// process waits for key, the same in all its attempts, or "" if it is not registered as waiting.
func (t *Target) Init(key, owner, contender string) {
	slot, hash := SlotOf(key), hashOf(key)
	t.key, t.owner = key, owner
	if contender != "" {
		t.contention = &contention{contender: contender}
	}
	t.bucket = bucketName(slot, hash)
	t.slot = slot
}

// Replaced is the detached lock of which an attempt makes its own: see lua/attach.lua.
type Replaced struct {
	Owners []string // whose key it may be: the detached owner, and those of earlier attempts to attach it
	Token  int64    // of the detached lock
	Top    int64    // the highest token that its lease has reserved; 0: unknown
}

// Replace makes t the target of an attempt to attach by. It follows Init, and t has no contender.
func (t *Target) Replace(by *Replaced) { t.replaced = by }

// Replaced is what was given to Replace; nil for all other attempts.
func (t *Target) Replaced() *Replaced { return t.replaced }

// Share makes t that of a read lease. It is called before Init.
func (t *Target) Share() { t.shared = true }

// Shared reports whether t is that of a read lease.
func (t *Target) Shared() bool { return t.shared }

// Key is the lock key, prefix included.
func (t *Target) Key() string { return t.key }

// Owner is the whole stored value.
func (t *Target) Owner() string { return t.owner }

// Contender is the contender that the attempt is made for; "" if there is none.
func (t *Target) Contender() string {
	if t.contention == nil {
		return ""
	}
	return t.contention.contender
}

// contention is what only an attempt for a contender has. Most attempts are for none, so it is not in the
// Target.
type contention struct {
	contender string
	carried   *carried // the offer that the attempt makes; nil: none
	follower  string   // see Follower
}

// Follower is the contender that was next after this one, when it was granted the key; "": none, or unknown.
// Its owner, a lease, guards it.
func (t *Target) Follower() string {
	if t.contention == nil {
		return ""
	}
	return t.contention.follower
}

// SetFollower sets the Follower of an attempt for a contender.
func (t *Target) SetFollower(name string) {
	if t.contention != nil {
		t.contention.follower = name
	}
}

// A bucket is the name of a key's fence bucket, which has the same hash slot as the key.
type bucket [len(Reserved) + 3 + len(bucketPart) + 1]byte

const bucketPart = "}:fence:"

// appendName appends the name of what a node keeps for the key besides, as an argument of a command: it has
// the key's hash slot.
func (t *Target) appendName(b []byte, part string) []byte {
	var name [64]byte
	tag := slotTags()[t.slot]
	return link.AppendArg(b, append(append(append(append(name[:0], Reserved...), tag[:]...), part...), t.key...))
}

// The wants and offers of a key: see lua/release.lua. Earlier versions have the same wants, and offers
// elsewhere: so those who wait are one queue, in which they and we make turns for each other.
const (
	wantsPart  = "}:wants:"
	offersPart = "}:offers:"

	readersPart = "}:readers:" // see lua/readers.lua
)

// bucketName names the fence bucket for keys of that slot and hash. All clients of a
// node must agree on it for ever: two names for one key would be two counters.
func bucketName(slot uint16, hash uint32) (b bucket) {
	const hex = "0123456789abcdef"
	n := copy(b[:], Reserved)
	n += copy(b[n:], slotTags()[slot][:])
	n += copy(b[n:], bucketPart)
	b[n] = hex[hash%bucketsPerSlot]
	return b
}

// KeysOf are key and what a node keeps for it besides: its fence bucket and its wants, in one hash slot.
func KeysOf(key string) []string {
	bucket := bucketName(SlotOf(key), hashOf(key))
	return []string{key, string(bucket[:]), Reserved + SlotTag(key) + wantsPart + key}
}

// hashOf is FNV-1a with the last step of MurmurHash3, because the low bits of FNV-1a
// depend on nothing but the low bits of the key's characters. Which bucket a key has
// depends on it, so it cannot change.
func hashOf(key string) uint32 {
	h := uint32(2166136261)
	for i := range len(key) {
		h = (h ^ uint32(key[i])) * 16777619
	}
	h = (h ^ h>>16) * 0x85ebca6b
	h = (h ^ h>>13) * 0xc2b2ae35
	return h ^ h>>16
}

// slotTags gives, for every hash slot, three characters that hash to it. They are
// found by search, once, when the first lock asks.
var slotTags = sync.OnceValue(func() *[slots][3]byte {
	const alphabet = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_"
	var tags [slots][3]byte
	for i := range len(alphabet) * len(alphabet) {
		a, b := alphabet[i/len(alphabet)], alphabet[i%len(alphabet)]
		crc := crcOf(crcOf(0, a), b)
		for _, c := range []byte(alphabet) {
			if slot := crcOf(crc, c) % slots; tags[slot][0] == 0 {
				tags[slot] = [3]byte{a, b, c}
			}
		}
	}
	return &tags
})

// spreadSlots are three slots that are far apart, so that they are not all on one of several servers.
var spreadSlots = [...]uint16{slots / 6, slots / 2, slots / 6 * 5}

// SpreadTags returns a hash tag, without braces, for each of three slots that are far apart.
func SpreadTags() (tags []string) {
	for _, slot := range spreadSlots {
		tag := slotTags()[slot]
		tags = append(tags, string(tag[:]))
	}
	return tags
}

// SlotTag is three characters that hash to key's slot.
func SlotTag(key string) string {
	tag := slotTags()[SlotOf(key)]
	return string(tag[:])
}

// SlotOf is the hash slot of key, by the rule of the Redis Cluster specification: only
// what stands between the first { and the next } counts, unless that is empty.
func SlotOf(key string) uint16 {
	if open := strings.IndexByte(key, '{'); open >= 0 {
		if n := strings.IndexByte(key[open+1:], '}'); n > 0 {
			key = key[open+1 : open+1+n]
		}
	}
	return crc16(key) % slots
}

// crc16 is CRC-16/XMODEM, which Redis Cluster hashes keys with.
func crc16(s string) uint16 {
	var crc uint16
	for i := range len(s) {
		crc = crcOf(crc, s[i])
	}
	return crc
}

// crcOf is crc16 of a text that ends with b, where crc is that of what stands before.
func crcOf(crc uint16, b byte) uint16 { return crc<<8 ^ crcTable[byte(crc>>8)^b] }

var crcTable = func() (table [256]uint16) {
	for i := range table {
		crc := uint16(i) << 8
		for range 8 {
			carry := crc & 0x8000
			crc <<= 1
			if carry != 0 {
				crc ^= 0x1021
			}
		}
		table[i] = crc
	}
	return table
}()
