package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// rawBaton is the limit of one caller per process: what a hand-over by one script and one message per node costs at
// best, with Go's net package and no client library. It is no lock: all processes are one ring, each hands on to the
// next, nobody may fail, and a node that does not answer ends it. It has the same two goroutines that any client has:
// one that reads messages, and the caller.
type rawBaton struct {
	me    string
	nodes []*rawNode
	key   string // of the last lock
}

// rawNode is one server, on two connections.
type rawNode struct {
	conn    net.Conn
	replies *bufio.Reader
	inbox   net.Conn
	got     chan string // the keys that were handed over
}

// rawRelease hands KEYS[1] on to the next in the ring, with a token, as a lock does.
const rawRelease = `
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local next = redis.call('ZRANGEBYLEX', 'ring', '(' .. ARGV[1], '+', 'LIMIT', 0, 1)[1]
  or redis.call('ZRANGE', 'ring', 0, 0)[1]
redis.call('SET', KEYS[1], next, 'PX', ARGV[2])
redis.call('INCR', 'token')
redis.call('PUBLISH', next, KEYS[1])
return 1`

var (
	rawSHA = redis.NewScript(rawRelease).Hash()
	rawTTL = strconv.FormatInt(ttl.Milliseconds(), 10)
)

func openRawBaton(s settings) (locker, error) {
	r := &rawBaton{me: uuid.NewString()}
	for _, addr := range s.Addrs {
		n := &rawNode{got: make(chan string, 16)}
		r.nodes = append(r.nodes, n)
		var errs [2]error
		n.conn, errs[0] = net.Dial("tcp", addr)
		n.inbox, errs[1] = net.Dial("tcp", addr)
		if err := errors.Join(errs[:]...); err != nil {
			return nil, err
		}
		n.replies = bufio.NewReader(n.conn)
		messages := bufio.NewReader(n.inbox)
		if _, err := n.inbox.Write(rawCommand("SUBSCRIBE", r.me)); err != nil {
			return nil, err
		}
		if _, err := rawLines(messages, 6); err != nil {
			return nil, err
		}
		if _, err := n.do("EVAL", rawRelease, "1", "none", r.me); err != nil { // which loads it
			return nil, err
		}
		if _, err := n.do("ZADD", "ring", "0", r.me); err != nil {
			return nil, err
		}
		go func() { // ends with the connection
			for {
				key, err := rawLines(messages, 7)
				if err != nil {
					return
				}
				n.got <- key
			}
		}()
	}
	return r, nil
}

func rawCommand(args ...string) []byte {
	b := fmt.Appendf(nil, "*%d\r\n", len(args))
	for _, a := range args {
		b = fmt.Appendf(b, "$%d\r\n%s\r\n", len(a), a)
	}
	return b
}

// rawLines reads so many lines, and returns the last.
func rawLines(r *bufio.Reader, n int) (last string, err error) {
	for range n {
		if last, err = r.ReadString('\n'); err != nil {
			return "", err
		}
	}
	return strings.TrimSuffix(last, "\r\n"), nil
}

// do sends one command whose reply is a line.
func (n *rawNode) do(args ...string) (string, error) {
	if _, err := n.conn.Write(rawCommand(args...)); err != nil {
		return "", err
	}
	text, err := rawLines(n.replies, 1)
	if strings.HasPrefix(text, "-") {
		err = errors.New(text)
	}
	return text, err
}

// lock is called by one goroutine, for one key after the other: that of the warm-up, and that of the load.
func (r *rawBaton) lock(ctx context.Context, key string) (held, error) {
	if r.key != key {
		r.key = key
		text, err := r.nodes[0].do("SET", key, r.me, "NX", "PX", rawTTL)
		if err != nil {
			return nil, err
		}
		if text == "+OK" { // the first of all
			for _, n := range r.nodes[1:] {
				if _, err := n.do("SET", key, r.me, "PX", rawTTL); err != nil {
					return nil, err
				}
			}
			return r, nil
		}
	}
	for _, n := range r.nodes {
		for got := ""; got != key; {
			select {
			case got = <-n.got:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
	return r, nil
}

// release writes to all nodes before it reads from any.
func (r *rawBaton) release() error {
	c := rawCommand("EVALSHA", rawSHA, "1", r.key, r.me, rawTTL)
	for _, n := range r.nodes {
		if _, err := n.conn.Write(c); err != nil {
			return err
		}
	}
	for _, n := range r.nodes {
		if text, err := rawLines(n.replies, 1); err != nil || text != ":1" {
			return fmt.Errorf("release: %q: %w", text, err)
		}
	}
	return nil
}

func (r *rawBaton) close() {
	for _, n := range r.nodes {
		_ = n.conn.Close()
		_ = n.inbox.Close()
	}
}
