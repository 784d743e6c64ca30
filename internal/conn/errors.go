package conn

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"unicode"

	"github.com/redis/go-redis/v9"
)

// IsReply reports whether err is an answer of the server, and not a failure to get one.
func IsReply(err error) bool {
	if err == nil { // the usual case, in which reply must not be allocated
		return false
	}
	var reply redis.Error
	if !errors.As(err, &reply) {
		return false
	}
	_, dialing := NoMaster(err)
	return !dialing
}

// HasCode reports whether a server answered with one of these error codes. Before Redis 7, an error
// inside a script is wrapped in a text of its own, with the code further back.
func HasCode(err error, codes ...string) bool {
	if err == nil { // the usual case, in which reply must not be allocated
		return false
	}
	var reply redis.Error
	if !errors.As(err, &reply) {
		return false
	}
	text := reply.Error()
	inScript := strings.HasPrefix(text, "ERR Error running script") ||
		strings.HasPrefix(text, "ERR Error compiling script")
	for _, code := range codes {
		if strings.HasPrefix(text, code+" ") || text == code {
			return true
		}
		if inScript && strings.Contains(text, code+" ") {
			return true
		}
	}
	return false
}

// A Trait is what an error code says, whatever the words behind it.
type Trait uint16

// The traits. What has none of the first two, as all that is not in the table, may be over the next time.
const (
	AboutKey Trait = 1 << iota // the key holds other data: other keys are not concerned
	Rights                     // somebody has to give the user rights, or this client its password
	Always                     // it is the answer to every command, for as long as the server is in that state
	Unready                    // the server cannot vote: a replica, or one that loads its data
	Replaced                   // the server may be another one than before
	// it says so for now: a state of the server, of its Cluster or of the login that ends
	Passing
	Again // it only says how or where to ask again
	// the script has written nothing: the server finds that out before the first write
	Unwritten
	Unless // the same, unless a command of the script met it
)

// codes is all that this module knows of error codes, but for what single ones say of a protocol.
var codes = []codeTraits{
	{"NOAUTH", Rights | Always | Passing | Unwritten},
	{"WRONGPASS", Rights | Always | Unwritten},
	{"NOPERM", Rights | Unless},
	{"WRONGTYPE", AboutKey | Unless},
	{"READONLY", Unready | Replaced | Passing | Unwritten},
	{"MASTERDOWN", Unready | Replaced | Always | Passing | Unwritten},
	{"LOADING", Unready | Replaced | Always | Passing | Unwritten},
	{"BUSY", Always | Passing | Unwritten},
	{"NOSCRIPT", Again | Replaced | Unwritten},
	{"EPOCH", Again | Replaced | Unwritten}, // of lua/acquire.lua
	{"MOVED", Again | Unwritten},
	{"ASK", Again | Unwritten},
	{"OOM", Unwritten},
	{"NOREPLICAS", Unwritten},
	{"MISCONF", Unwritten},
	{"CROSSSLOT", Unwritten},
	{"CLUSTERDOWN", Passing | Unwritten},
	{"TRYAGAIN", Passing | Unwritten},
}

type codeTraits struct {
	code string
	says Trait
}

// Says reports whether a server's error has one of these traits.
func Says(err error, any Trait) bool {
	if err == nil {
		return false
	}
	return slices.ContainsFunc(codes, func(c codeTraits) bool {
		return c.says&any != 0 && HasCode(err, c.code)
	}) ||
		any&Rights != 0 && saysIn(err, strings.HasPrefix, noRightsInScript) ||
		any&Always != 0 && saysIn(err, strings.Contains, []string{"max number of clients"})
}

// NoRights reports whether a server refused a command because the user lacks the rights, in the
// wording of any server.
func NoRights(err error) bool {
	return HasCode(err, "NOPERM") || saysIn(err, strings.HasPrefix, noRightsInScript)
}

// noRightsInScript is how Redis 7.0 and Valkey 8 phrase NOPERM for a command inside a script.
var noRightsInScript = []string{"ERR The user executing the script can't", "ERR ACL failure in script"}

// RefusesLogin reports whether err is a reply to a login, or to a command before one. Those without a code of
// their own are for a password without its user, a database that the server does not have, and too many
// clients. DENIED is the protected mode.
func RefusesLogin(err error) bool {
	return HasCode(err, "WRONGPASS", "NOAUTH") || saysIn(err, strings.HasPrefix,
		[]string{"ERR AUTH ", "ERR DB index ", "ERR max number of clients ", "DENIED "})
}

// saysIn reports whether the text of a server's error has one of these parts.
func saysIn(err error, has func(text, part string) bool, parts []string) bool {
	var reply redis.Error
	return errors.As(err, &reply) &&
		slices.ContainsFunc(parts, func(part string) bool { return has(reply.Error(), part) })
}

// RefusesSlots reports whether a server refused what a script did because it accessed keys of two hash slots:
// it has only some of them, so that it is one of several (a Cluster, also behind one address).
func RefusesSlots(err error) bool {
	if !IsReply(err) {
		return false
	}
	text := strings.ToLower(err.Error())
	return slices.ContainsFunc([]string{
		"crossslot", "non local key", "do not hash to the same slot", "don't hash to the same slot",
		"must be in same slot", // Aliyun
	}, func(words string) bool { return strings.Contains(text, words) })
}

// RefusesCommand reports whether a server says that it does not have this command, or that the user may not
// call it. All of them name it, in words of their own.
func RefusesCommand(err error, name string) bool {
	if !IsReply(err) || HasCode(err, "NOSCRIPT") || RefusesSlots(err) { // "Please use EVAL", or its keys
		return false
	}
	text, _, _ := strings.Cut(err.Error(), "with args beginning") // of the command
	return slices.ContainsFunc(strings.FieldsFunc(text, func(r rune) bool { return !unicode.IsLetter(r) }),
		func(word string) bool { return strings.EqualFold(word, name) })
}

// TimedOut reports whether err is a timeout, of a ctx or of a socket.
func TimedOut(err error) bool {
	if err == nil {
		return false
	}
	var ne net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &ne) && ne.Timeout()
}

// NoMaster reports whether err comes from go-redis's dialer for a Sentinel-managed master because no
// Sentinel named the master. Such an error may contain the answer of a Sentinel, which is no reply
// of the node. unknown reports that a Sentinel answered that it knows no master of that name.
func NoMaster(err error) (unknown, is bool) {
	if err == nil || !strings.Contains(err.Error(), "all sentinels specified in configuration are unreachable") {
		return false, false
	}
	return errors.Is(err, redis.Nil), true
}

// ServerError is an error reply that go-redis does not return as a redis.Error: the reply to one
// request of a batch, or the last reply before the server closed the connection.
type ServerError string

func (e ServerError) Error() string { return string(e) }

// RedisError makes it a redis.Error.
func (ServerError) RedisError() {}

// ReplyError is the error of that text which a server has answered. To a command of more than ten arguments,
// on a connection without a login, Redis says something else than NOAUTH, and closes the connection.
func ReplyError(text string) ServerError {
	if strings.HasPrefix(text, "ERR Protocol error: unauthenticated ") {
		text = "NOAUTH Authentication required (" + text + ")"
	}
	return ServerError(text)
}
