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

// rawBaton is the limit of one caller per process: what a hand-over by one script and one message per node
// costs at best, with Go's net package and no client library, or with go-redis. It is no lock: all processes
// are one ring, each hands on to the next, nobody may fail, and a node that does not answer ends it. Messages
// are read by a goroutine for each node, as any client does.
type rawBaton struct {
	me    string
	nodes []rawNode
	key   string     // of the last lock
	pass  rawCommand // which hands it on
}

// rawNode is the way to one server.
type rawNode interface {
	// do sends a command, whose reply is text.
	do(rawCommand) (string, error)
	// send and receive are do in two parts: all nodes are sent a command before the reply of any is awaited.
	send(rawCommand) error
	receive() (string, error)
	// keys are those that were handed over to this process.
	keys() <-chan string
	close()
}

// rawCommand is a command in the form that each kind of node wants, because it is made once for all.
type rawCommand struct {
	args []any
	wire []byte
}

func newRawCommand(args ...string) (c rawCommand) {
	c.wire = fmt.Appendf(nil, "*%d\r\n", len(args))
	for _, a := range args {
		c.args = append(c.args, a)
		c.wire = fmt.Appendf(c.wire, "$%d\r\n%s\r\n", len(a), a)
	}
	return c
}

// rawRelease hands KEYS[1] on to the next in the ring, with a token, as a lock does.
const rawRelease = `
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.status_reply('NONE') end
local next = redis.call('ZRANGEBYLEX', 'ring', '(' .. ARGV[1], '+', 'LIMIT', 0, 1)[1]
  or redis.call('ZRANGE', 'ring', 0, 0)[1]
redis.call('SET', KEYS[1], next, 'PX', ARGV[2])
redis.call('INCR', 'token')
redis.call('PUBLISH', next, KEYS[1])
return redis.status_reply('OK')`

var (
	rawSHA = redis.NewScript(rawRelease).Hash()
	rawTTL = strconv.FormatInt(ttl.Milliseconds(), 10)
)

func openRawBaton(s settings) (locker, error) { return openRing(s, dialRawNode) }

func openRawGoredis(s settings) (locker, error) { return openRing(s, openGoredisNode) }

// openRing joins the ring. open subscribes me to what is handed over.
func openRing(s settings, open func(addr, me string) (rawNode, error)) (locker, error) {
	r := &rawBaton{me: uuid.NewString()}
	for _, addr := range s.Addrs {
		n, err := open(addr, r.me)
		if err != nil {
			return nil, err
		}
		r.nodes = append(r.nodes, n)
		if _, err := n.do(newRawCommand("EVAL", rawRelease, "1", "none", r.me)); err != nil { // which loads it
			return nil, err
		}
		join := newRawCommand("EVAL", "redis.call('ZADD', 'ring', 0, ARGV[1]) return 'OK'", "0", r.me)
		if _, err := n.do(join); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// lock is called by one goroutine, for one key after the other: that of the warm-up, and that of the load.
func (r *rawBaton) lock(ctx context.Context, key string) (held, error) {
	if r.key != key {
		r.key, r.pass = key, newRawCommand("EVALSHA", rawSHA, "1", key, r.me, rawTTL)
		text, err := r.nodes[0].do(newRawCommand("SET", key, r.me, "NX", "PX", rawTTL))
		if err != nil {
			return nil, err
		}
		if text == "OK" { // the first of all
			for _, n := range r.nodes[1:] {
				if _, err := n.do(newRawCommand("SET", key, r.me, "PX", rawTTL)); err != nil {
					return nil, err
				}
			}
			return r, nil
		}
	}
	for _, n := range r.nodes {
		for got := ""; got != key; {
			select {
			case got = <-n.keys():
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
	return r, nil
}

// release writes to all nodes before it reads from any. The first node's request is the caller's own.
func (r *rawBaton) release() error {
	for _, n := range r.nodes[1:] {
		if err := n.send(r.pass); err != nil {
			return err
		}
	}
	text, err := r.nodes[0].do(r.pass)
	for _, n := range r.nodes[1:] {
		if err != nil || text != "OK" {
			break
		}
		text, err = n.receive()
	}
	if err != nil || text != "OK" {
		return fmt.Errorf("release: %q: %w", text, err)
	}
	return nil
}

func (r *rawBaton) close() {
	for _, n := range r.nodes {
		n.close()
	}
}

// netNode is a node on two connections of its own.
type netNode struct {
	conn    net.Conn
	replies *bufio.Reader
	inbox   net.Conn
	got     chan string
}

func dialRawNode(addr, me string) (rawNode, error) {
	n := &netNode{got: make(chan string, 16)}
	var errs [2]error
	n.conn, errs[0] = net.Dial("tcp", addr)
	n.inbox, errs[1] = net.Dial("tcp", addr)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	n.replies = bufio.NewReader(n.conn)
	messages := bufio.NewReader(n.inbox)
	if _, err := n.inbox.Write(newRawCommand("SUBSCRIBE", me).wire); err != nil {
		return nil, err
	}
	if _, err := rawLines(messages, 6); err != nil {
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
	return n, nil
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

func (n *netNode) do(c rawCommand) (string, error) {
	if err := n.send(c); err != nil {
		return "", err
	}
	return n.receive()
}

func (n *netNode) send(c rawCommand) error {
	_, err := n.conn.Write(c.wire)
	return err
}

func (n *netNode) receive() (string, error) {
	text, err := rawLines(n.replies, 1)
	switch {
	case err != nil || text == "$-1":
		return "", err
	case text[0] == '-':
		return "", errors.New(text)
	case text[0] == '$':
		return rawLines(n.replies, 1)
	}
	return text[1:], nil
}

func (n *netNode) keys() <-chan string { return n.got }

func (n *netNode) close() {
	_ = n.conn.Close()
	_ = n.inbox.Close()
}

// goredisNode is a node over go-redis. A goroutine of its own makes the requests that are sent.
type goredisNode struct {
	rdb     *redis.Client
	sub     *redis.PubSub
	asks    chan rawCommand
	answers chan goredisReply
	got     chan string
}

type goredisReply struct {
	text string
	err  error
}

func openGoredisNode(addr, me string) (rawNode, error) {
	n := &goredisNode{
		rdb:  goredis(addr, nil),
		asks: make(chan rawCommand, 1), answers: make(chan goredisReply, 1), got: make(chan string, 16),
	}
	go func() { // ends with close
		for c := range n.asks {
			text, err := n.do(c)
			n.answers <- goredisReply{text, err}
		}
	}()
	ctx := context.Background()
	n.sub = n.rdb.Subscribe(ctx, me)
	if _, err := n.sub.Receive(ctx); err != nil {
		return nil, err
	}
	go func() { // ends with the subscription
		for {
			m, err := n.sub.ReceiveMessage(ctx)
			if err != nil {
				return
			}
			n.got <- m.Payload
		}
	}()
	return n, nil
}

func (n *goredisNode) do(c rawCommand) (string, error) {
	text, err := n.rdb.Do(context.Background(), c.args...).Text()
	if errors.Is(err, redis.Nil) {
		err = nil
	}
	return text, err
}

func (n *goredisNode) send(c rawCommand) error {
	n.asks <- c
	return nil
}

func (n *goredisNode) receive() (string, error) {
	r := <-n.answers
	return r.text, r.err
}

func (n *goredisNode) keys() <-chan string { return n.got }

func (n *goredisNode) close() {
	_ = n.sub.Close()
	_ = n.rdb.Close()
	close(n.asks)
}
