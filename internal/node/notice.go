package node

import (
	"fmt"
	"strconv"
	"strings"
)

// What release.lua publishes, and where.

// News is what the end of a lease is to those who wait for the key.
type News uint8

// The kinds of news.
const (
	NoNews     News = iota
	NewsLook        // the value that the lease was for may be there: a Fetcher is to look
	NewsFailed      // what the lease was for has failed
)

// A Notice is a message about a key.
type Notice struct {
	Contender string // whose turn it is; "": of another contender than the one that receives it
	Failed    string // the owner that had the key, if its work has failed; then Contender is empty
}

// Channel returns the channel on which contender receives notices about key, and what the messages
// for it begin with: "" if all of them are.
func (n *Node) Channel(key, contender string) (channel, name string) {
	if n.IsCluster() {
		return key, ""
	}
	client, number := split(contender)
	return Inbox + client, number
}

// ParseNotice reads a message that contender got through its Channel.
func ParseNotice(name, contender, text string) Notice {
	if name == "" { // on a Cluster; a contender's name ends with a number
		if owner, failed := strings.CutSuffix(text, " failed"); failed {
			return Notice{Failed: owner}
		}
		return Notice{Contender: text}
	}
	text = strings.TrimPrefix(text, name)
	if owner, failed := strings.CutPrefix(text, " failed "); failed {
		return Notice{Failed: owner}
	}
	if text == " turn" {
		return Notice{Contender: contender}
	}
	return Notice{}
}

// RetainMark ends an owner whose client may keep the lease when nobody holds it, until another client
// wants the key: see acquire.lua. Sequence numbers have no capitals.
const RetainMark = "R"

// Retains reports whether owner has that mark, and is an owner of this library's: label#client-number.
func Retains(owner string) bool {
	client, _ := split(owner)
	return strings.HasSuffix(owner, RetainMark) && owner != Readers && client != "" &&
		strings.Contains(owner, "#") && !strings.HasPrefix(owner, TurnOf)
}

// Readers is the owner of a key that read leases share, and ReadersInbox the client to whose inbox a recall
// goes that says that somebody wants it: see lua/readers.lua. ShareMark ends the owners of read leases.
const (
	Readers      = "flightlock:readers#" + ReadersInbox + "-" + RetainMark
	ReadersInbox = "readers"
	ShareMark    = "S"
)

// Shares reports whether owner is that of a read lease, or the contender that waits for one.
func Shares(owner string) bool { return strings.HasSuffix(owner, ShareMark) }

// RecallName begins the recalls among the messages of an inbox. Numbers of contenders have no colon.
const RecallName = "recall:"

// A Recall says that somebody wants a key whose lease its client may have retained.
type Recall struct {
	Key       string // with its prefix
	Owner     string // of the lease
	Contender string // who is registered as waiting; "": nobody is; Revoked: the lock is to end
}

// Revoked, as the contender of a Recall, stands for none: the lock that has the lease is to end at once. It
// is no name of a contender: these have a number.
const Revoked = "!"

// Revocation is the message that has Owner's client end the lock of key.
func Revocation(owner, key string) (inbox, text string) {
	client, _ := split(owner)
	return Inbox + client, fmt.Sprintf("%s %d %d %s%s%s", RecallName, len(owner), len(Revoked), owner, Revoked,
		key)
}

// ParseRecall reads a recall as acquire.lua publishes it: two lengths, and the three texts, which may
// have any bytes.
func ParseRecall(text string) (r Recall, ok bool) {
	var lengths [2]int
	name, rest, _ := strings.Cut(text, " ")
	for i := range lengths {
		var length string
		length, rest, _ = strings.Cut(rest, " ")
		n, err := strconv.Atoi(length)
		if err != nil || n < 0 || n > len(rest) {
			return Recall{}, false
		}
		lengths[i] = n
	}
	owner, contender := lengths[0], lengths[1]
	if name != RecallName || owner+contender >= len(rest) {
		return Recall{}, false
	}
	return Recall{Owner: rest[:owner], Contender: rest[owner : owner+contender], Key: rest[owner+contender:]},
		true
}

// Inbox begins the name of a client's inbox: see release.lua.
const Inbox = "flightlock:inbox:"

// split splits a contender's name, label#client-number.
func split(contender string) (client, number string) {
	contender = contender[strings.LastIndexByte(contender, '#')+1:]
	at := strings.LastIndexByte(contender, '-')
	return contender[:max(at, 0)], contender[at+1:]
}
