package conn

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"

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

// NoRights reports whether a server refused a command because the user lacks the rights, in the
// wording of any server.
func NoRights(err error) bool {
	var reply redis.Error
	return HasCode(err, "NOPERM") || errors.As(err, &reply) &&
		slices.ContainsFunc(noRightsInScript, func(words string) bool {
			return strings.HasPrefix(reply.Error(), words)
		})
}

// noRightsInScript is how Redis 7.0 and Valkey 8 phrase NOPERM for a command inside a script.
var noRightsInScript = []string{"ERR The user executing the script can't", "ERR ACL failure in script"}

// RefusesSlots reports whether a server refused what a script did because it accessed keys of two hash slots: it has
// only some of them, so that it is one of several (a Cluster, also behind one address).
func RefusesSlots(err error) bool {
	if !IsReply(err) {
		return false
	}
	text := strings.ToLower(err.Error())
	return slices.ContainsFunc([]string{
		"crossslot", "non local key", "do not hash to the same slot", "don't hash to the same slot",
	}, func(words string) bool { return strings.Contains(text, words) })
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

// ReplyError is the error of that text which a server has answered. To a command of more than ten arguments, on a
// connection without a login, Redis says something else than NOAUTH, and closes the connection.
func ReplyError(text string) ServerError {
	if strings.HasPrefix(text, "ERR Protocol error: unauthenticated ") {
		text = "NOAUTH Authentication required (" + text + ")"
	}
	return ServerError(text)
}
