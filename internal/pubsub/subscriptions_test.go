package pubsub

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// A recorder is a Listener that keeps the events it receives, and checks what every watch is
// promised.
type recorder struct {
	t     *testing.T
	heard chan Event
	hook  func(Kind) // called by OnEvent

	busy atomic.Bool // in OnEvent, so that a second one is noticed
	mu   sync.Mutex  // guards last
	last Kind
}

func newRecorder(t *testing.T) *recorder {
	return &recorder{t: t, heard: make(chan Event, 1000)}
}

func (r *recorder) OnEvent(i int, e Event) {
	if r.busy.Swap(true) {
		r.t.Error("two calls of OnEvent for one watch at once")
		return
	}
	defer r.busy.Store(false)
	r.mu.Lock()
	defer r.mu.Unlock()
	if i != 7 {
		r.t.Errorf("i is %d", i)
	}
	if e.Kind == Unsubscribed && r.last == Unsubscribed {
		r.t.Error("Unsubscribed came twice")
	}
	if e.Kind != Message {
		r.last = e.Kind
	}
	if r.hook != nil {
		r.hook(e.Kind)
	}
	select {
	case r.heard <- e:
	default: // a flood; the test does not check each
	}
}

// want waits for the next signal, which must be that one.
func (r *recorder) want(s Kind, text string) {
	r.t.Helper()
	select {
	case got := <-r.heard:
		if got != (Event{s, text}) {
			r.t.Fatalf("received %v, want %v", got, Event{s, text})
		}
	case <-time.After(patience):
		r.t.Fatalf("received nothing, want %v", Event{s, text})
	}
}

// until waits for such a signal, whatever comes before.
func (r *recorder) until(s Kind, text string) {
	r.t.Helper()
	if !r.hears(s, text) {
		r.t.FailNow()
	}
}

// hears is until for other goroutines than the test's.
func (r *recorder) hears(s Kind, text string) bool {
	r.t.Helper()
	for limit := time.After(patience); ; {
		select {
		case got := <-r.heard:
			if got == (Event{s, text}) {
				return true
			}
		case <-limit:
			r.t.Errorf("did not receive %v", Event{s, text})
			return false
		}
	}
}

// state is what the listener knows of the subscription.
func (r *recorder) state() Kind {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// watchAs is n.Watch, but r receives Subscribed too if the channel is confirmed already.
func watchAs(n *Subscriptions, channel, name string, r *recorder) *Watch {
	r.mu.Lock() // events come after this
	defer r.mu.Unlock()
	w, subscribed := n.Watch(channel, name, 7, r)
	if subscribed {
		r.last = Subscribed
		select {
		case r.heard <- Event{Kind: Subscribed}:
		default:
		}
	}
	return w
}

// watch begins a watch that ends with the test.
func watch(t *testing.T, n *Subscriptions, key string) *recorder {
	r := newRecorder(t)
	t.Cleanup(watchAs(n, key, "", r).Stop)
	return r
}

// subscribed is watch, confirmed.
func subscribed(t *testing.T, n *Subscriptions, key string) *recorder {
	t.Helper()
	r := watch(t, n, key)
	r.until(Subscribed, "")
	return r
}

func publish(t *testing.T, s *redistest.Server, key, text string) {
	t.Helper()
	if got := s.Do(t, "PUBLISH", key, text); got != int64(1) {
		t.Fatalf("PUBLISH %q reached %v", key, got)
	}
}

func channels(t *testing.T, s *redistest.Server) int {
	t.Helper()
	return len(s.Do(t, "PUBSUB", "CHANNELS").([]any)) + len(s.Do(t, "PUBSUB", "SHARDCHANNELS").([]any))
}

// subscribers counts the server's pubsub connections.
func subscribers(t *testing.T, s *redistest.Server) int {
	t.Helper()
	return strings.Count(s.Do(t, "CLIENT", "LIST", "TYPE", "pubsub").(string), "\n")
}

// timesCalled is how often a command was called or refused.
func timesCalled(t *testing.T, s *redistest.Server, name string) (n int) {
	t.Helper()
	for line := range strings.Lines(s.Do(t, "INFO", "commandstats").(string)) {
		if stat, ok := strings.CutPrefix(line, "cmdstat_"+name+":"); ok {
			var did, rejected int
			var usec, perCall string
			_, _ = fmt.Sscanf(strings.NewReplacer(",", " ", "=", " ").Replace(stat),
				"calls %d usec %s usec_per_call %s rejected_calls %d", &did, &usec, &perCall, &rejected)
			n += did + rejected
		}
	}
	return n
}

// topics is how many topics the node has, those that linger included.
func topics(n *Subscriptions) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.topics)
}

// hasten shortens the times that the notices of n wait for, before the first watch.
func hasten(n *Subscriptions) {
	n.topicIdle, n.connIdle, n.pulse = time.Millisecond, time.Millisecond, 50*time.Millisecond
}

// wantNothing waits until all traces of watching are gone: topics, subscriptions,
// connections, goroutines.
func wantNothing(t *testing.T, n *Subscriptions, servers ...*redistest.Server) {
	t.Helper()
	redistest.Eventually(t, patience, "nothing is watched", func() bool { return topics(n) == 0 })
	for _, s := range servers {
		redistest.Eventually(t, patience, "no subscription is left", func() bool { return channels(t, s) == 0 })
		redistest.Eventually(t, patience, "no connection is left", func() bool { return subscribers(t, s) == 0 })
	}
	redistest.Eventually(t, patience, "no goroutine is left", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.subscribers) == 0 && !n.resolving && n.unresolved.Len() == 0
	})
}

// tlsFront is a TLS server in front of s.
func tlsFront(t *testing.T, s *redistest.Server) (addr string) {
	h := httptest.NewTLSServer(nil) // for its certificate
	h.Close()
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: h.TLS.Certificates})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() { _ = ln.Close(); wg.Wait() })
	join := func(from net.Conn) {
		to, err := net.Dial("tcp", s.Addr())
		if err != nil {
			_ = from.Close()
			return
		}
		wg.Go(func() { _, _ = io.Copy(to, from); _ = to.Close() })
		_, _ = io.Copy(from, to)
		_ = from.Close()
	}
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { join(c) })
		}
	})
	return ln.Addr().String()
}

// sentinelOf is a sentinel that names s.
func sentinelOf(t *testing.T, s *redistest.Server) *redistest.Fake {
	bulk := func(text string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(text), text) }
	return redistest.StartFake(t, func(cmd []string) string {
		if len(cmd) > 1 && strings.EqualFold(cmd[1], "get-master-addr-by-name") {
			return "*2\r\n" + bulk("127.0.0.1") + bulk(fmt.Sprint(s.Port()))
		}
		if strings.EqualFold(cmd[0], "subscribe") {
			return ""
		}
		return "*0\r\n"
	})
}

// Whatever the protocol, the transport and the kind of client: a watch is confirmed, receives what
// is published, and is confirmed again on a new connection.
func TestAWatchHears(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t, "--requirepass", "secret")
	secured := tlsFront(t, s)
	sentinel := sentinelOf(t, s)
	for name, client := range map[string]redis.UniversalClient{
		"RESP3": s.Client(t),
		"RESP2": s.Client(t, func(o *redis.Options) { o.Protocol = 2 }),
		"TLS": s.Client(t, at(secured), func(o *redis.Options) {
			o.TLSConfig = &tls.Config{InsecureSkipVerify: true} // of a test
		}),
		"a dialer that heeds nothing": s.Client(t, func(o *redis.Options) {
			o.Dialer = func(context.Context, string, string) (net.Conn, error) { return net.Dial("tcp", s.Addr()) }
		}),
		"Sentinel": redis.NewFailoverClient(&redis.FailoverOptions{
			MasterName: "m", SentinelAddrs: []string{sentinel.Addr()}, Password: "secret",
		}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(func() { _ = client.Close() })
			n := newSubs(t, client)
			r := watch(t, n, name)
			r.want(Subscribed, "")
			publish(t, s, name, "text")
			r.want(Message, "text")
			for range 2 {
				s.Do(t, "CLIENT", "KILL", "TYPE", "pubsub")
				r.want(Unsubscribed, "")
				r.want(Subscribed, "")
				redistest.Eventually(t, patience, "one connection is left", func() bool { return subscribers(t, s) == 1 })
				publish(t, s, name, "")
				r.want(Message, "")
			}
		})
		redistest.Eventually(t, patience, "the connection is closed", func() bool { return subscribers(t, s) == 0 })
	}
}

// Channels have the key's name, whatever bytes it is made of.
func TestAnyKeyCanBeWatched(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newSubs(t, s.Client(t))
	for _, key := range []string{"", " ", "\x00\xff\r\n", "[a-z]*?", "{}", strings.Repeat("long", 1<<10)} {
		r := watch(t, n, key)
		r.want(Subscribed, "")
		publish(t, s, key, key)
		r.want(Message, key)
	}
}

// Watches of one key share a subscription; each receives every notice. What is published for other
// keys is not theirs.
func TestWatchesShareATopic(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newSubs(t, s.Client(t))
	var all []*recorder
	for range 20 {
		all = append(all, subscribed(t, n, "k"))
	}
	other := subscribed(t, n, "other")
	publish(t, s, "k", "x")
	for _, r := range all {
		r.want(Message, "x")
	}
	publish(t, s, "other", "y")
	other.want(Message, "y")
	if got := timesCalled(t, s, "subscribe"); got != 2 {
		t.Errorf("%d SUBSCRIBEs", got)
	}
	if got := subscribers(t, s); got != 1 {
		t.Errorf("%d connections", got)
	}
}

// A message that names a watch is for that one alone; if that one does not exist any more, it is
// for nobody. The subscription is everybody's.
func TestAMessageIsForTheWatchThatItNames(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newSubs(t, s.Client(t))
	a, b, gone := newRecorder(t), newRecorder(t), newRecorder(t)
	defer watchAs(n, "inbox", "1", a).Stop()
	defer watchAs(n, "inbox", "12", b).Stop()
	w := watchAs(n, "inbox", "3", gone)
	for _, r := range []*recorder{a, b, gone} {
		r.want(Subscribed, "")
	}
	w.Stop()
	for _, text := range []string{"12 turn", "3 turn", "4 turn", "1", "1 turn", " turn", "", "12"} {
		publish(t, s, "inbox", text)
	}
	a.want(Message, "1")
	a.want(Message, "1 turn")
	b.want(Message, "12 turn")
	b.want(Message, "12")
	publish(t, s, "inbox", "1 the end")
	a.want(Message, "1 the end")
	if len(gone.heard) != 0 {
		t.Errorf("one that has stopped received %v", <-gone.heard)
	}
	if got := timesCalled(t, s, "subscribe"); got != 1 {
		t.Errorf("%d SUBSCRIBEs", got)
	}
}

// A key that is watched again soon is not subscribed to again. One that is not watched any
// more is unsubscribed from, and the connection is closed when it has been idle for long.
func TestATopicLingers(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newSubs(t, s.Client(t))
	hasten(n)
	n.topicIdle = time.Hour
	for range 50 {
		r := newRecorder(t)
		w := watchAs(n, "k", "", r)
		r.want(Subscribed, "")
		publish(t, s, "k", "x")
		r.want(Message, "x")
		w.Stop()
	}
	if got := timesCalled(t, s, "subscribe"); got != 1 {
		t.Errorf("%d SUBSCRIBEs", got)
	}
	n.mu.Lock()
	n.topicIdle = time.Millisecond
	n.mu.Unlock()
	w := watchAs(n, "k", "", newRecorder(t))
	w.Stop()
	w.Stop() // again changes nothing
	wantNothing(t, n, s)
	subscribed(t, n, "k") // and from the beginning
}

// A node without watches has no goroutine and no connection for them.
func TestNoWatchCostsNothing(t *testing.T) {
	c := redistest.StartServer(t).Client(t)
	before := runtime.NumGoroutine()
	n := newSubs(t, c)
	if after := runtime.NumGoroutine(); after > before {
		t.Errorf("%d goroutines, %d before", after, before)
	}
	if n.topics != nil || n.subscribers != nil {
		t.Error("there are maps")
	}
}

// Each break is reported, and each recovery.
func TestConnectionsThatAreKilledHeal(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newSubs(t, s.Client(t))
	one, two := subscribed(t, n, "one"), subscribed(t, n, "two")
	for i := range 4 { // each pause before the next connection is longer
		s.Do(t, "CLIENT", "KILL", "TYPE", "pubsub")
		for key, r := range map[string]*recorder{"one": one, "two": two} {
			r.want(Unsubscribed, "")
			r.want(Subscribed, "")
			publish(t, s, key, fmt.Sprint(i))
			r.want(Message, fmt.Sprint(i))
		}
	}
}

// A connection that is cut anywhere is made again, until everything is confirmed.
func TestConnectionsThatAreCutAnywhereHeal(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	for after := 0; after < 1000; after += 37 {
		n := newSubs(t, s.Client(t, at(p.Addr()), quick))
		p.CutReplies(after)
		var all []*recorder
		for i := range 10 {
			all = append(all, watch(t, n, fmt.Sprint("k", i)))
		}
		for _, r := range all {
			r.until(Subscribed, "")
		}
		p.CutReplies(-1)
		if err := n.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// A listener that reads the value after each Subscribed and each Message, and at no other time,
// sees every change in the end, whatever happens to the connection.
func TestNoWakeUpIsLost(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	n := newSubs(t, s.Client(t, at(p.Addr()), quick))
	n.topicIdle = 5 * time.Millisecond
	c := s.Client(t)
	const keys = 5
	var value [keys]atomic.Int64 // what one looks at
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { // trouble
		for i := 0; ctx.Err() == nil; i++ {
			select {
			case <-ctx.Done():
			case <-time.After(rand.N(50 * time.Millisecond)):
			}
			switch i % 3 {
			case 0:
				p.CutReplies(rand.IntN(2000))
			case 1:
				p.CutReplies(-1)
			case 2:
				p.ResetAll()
			}
		}
	})
	for k := range keys {
		key := fmt.Sprint("k", k)
		wg.Go(func() { // watches that come and go, so that the topic does too
			for ctx.Err() == nil {
				w := watchAs(n, key, "", newRecorder(t))
				time.Sleep(rand.N(10 * time.Millisecond))
				w.Stop()
				time.Sleep(rand.N(10 * time.Millisecond))
			}
		})
	}
	notice := func(k int, odd int64) bool { // waits for the value to become odd
		value[k].Store(odd - 1)
		key := fmt.Sprint("k", k)
		look := make(chan struct{}, 1)
		r := newRecorder(t)
		r.hook = func(s Kind) {
			if s != Unsubscribed {
				select {
				case look <- struct{}{}:
				default:
				}
			}
		}
		w := watchAs(n, key, "", r)
		defer w.Stop()
		wg.Go(func() {
			time.Sleep(rand.N(20 * time.Millisecond))
			value[k].Store(odd)
			c.Publish(t.Context(), key, "")
		})
		for limit := time.After(patience); value[k].Load() != odd; {
			select {
			case <-look:
			case <-limit:
				t.Error("a change was never noticed")
				return false
			}
		}
		return true
	}
	var waiting sync.WaitGroup
	for k := range keys {
		waiting.Go(func() {
			for round := int64(0); round < 30 && notice(k, 2*round+1); round++ {
			}
		})
	}
	waiting.Wait()
}

// clientWith is a client of a user with that right to channels.
func clientWith(t *testing.T, s *redistest.Server, rights ...any) *redis.Client {
	t.Helper()
	s.Do(t, append([]any{"ACL", "SETUSER", "u", "on", ">pw", "~*", "+@all", "resetchannels"}, rights...)...)
	return s.Client(t, func(o *redis.Options) { o.Username, o.Password = "u", "pw" })
}

// A channel that may not be read does not affect the others. It is tried again after a while.
func TestAForbiddenChannelIsLeftAlone(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newSubs(t, clientWith(t, s, "&ok*"))
	n.bar = 100 * time.Millisecond
	var all []*recorder
	bad1 := watch(t, n, "bad1")
	for i := range 1000 {
		all = append(all, watch(t, n, fmt.Sprint("ok", i)))
	}
	bad2 := watch(t, n, "bad2")
	for _, r := range all {
		r.want(Subscribed, "")
	}
	bad1.want(Unsubscribed, "")
	bad2.want(Unsubscribed, "")
	s.Do(t, "CLIENT", "KILL", "TYPE", "pubsub") // go-redis would never recover from this
	for _, r := range all {
		r.want(Unsubscribed, "")
		r.want(Subscribed, "")
	}
	s.Do(t, "ACL", "SETUSER", "u", "&bad*")
	for _, r := range []*recorder{bad1, bad2} {
		r.want(Subscribed, "")
	}
	publish(t, s, "bad1", "x")
	bad1.want(Message, "x")
	publish(t, s, "ok5", "y")
	all[5].want(Message, "y")
}

// A right that is revoked cuts the connection, and costs the other channels no more than that.
func TestAChannelThatBecomesForbidden(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newSubs(t, clientWith(t, s, "&a", "&b"))
	a, b := subscribed(t, n, "a"), subscribed(t, n, "b")
	s.Do(t, "ACL", "SETUSER", "u", "resetchannels", "&b")
	for _, r := range []*recorder{a, b} {
		r.want(Unsubscribed, "")
	}
	b.want(Subscribed, "")
	if a.state() != Unsubscribed {
		t.Error("a is subscribed")
	}
}

// When every channel is forbidden, or the command itself, the server gets one command and then none
// for a while.
func TestAServerThatForbidsAllIsLeftAlone(t *testing.T) {
	t.Parallel()
	const keys = 300
	for name, c := range map[string]struct {
		right any
		most  int // SUBSCRIBEs
	}{
		"channels": {"resetchannels", 2 * keys},
		// Watches that come one by one before the first refusal may have a command each.
		"command": {"-subscribe", keys / 2},
	} {
		t.Run(name, func(t *testing.T) {
			s := redistest.StartServer(t)
			n := newSubs(t, clientWith(t, s, c.right))
			hasten(n)
			var all []*Watch
			var ears []*recorder
			for i := range keys {
				r := newRecorder(t)
				ears, all = append(ears, r), append(all, watchAs(n, fmt.Sprint("k", i), "", r))
			}
			pings := func() int { return timesCalled(t, s, "ping") }
			redistest.Eventually(t, patience, "all are refused", func() bool {
				n.mu.Lock()
				defer n.mu.Unlock()
				for _, f := range n.subscribers {
					return f.refused.Len() == keys
				}
				return false
			})
			asked, pinged := timesCalled(t, s, "subscribe"), pings()
			if asked > c.most {
				t.Errorf("%d SUBSCRIBEs", asked)
			}
			redistest.Eventually(t, patience, "some time has passed", func() bool { return pings() > pinged+1 })
			if got := timesCalled(t, s, "subscribe"); got != asked {
				t.Errorf("%d SUBSCRIBEs, and still going", got)
			}
			for i, w := range all {
				if ears[i].state() == Subscribed {
					t.Error("a forbidden channel was confirmed")
				}
				w.Stop()
			}
			redistest.Eventually(t, patience, "nothing is left", func() bool { return topics(n) == 0 })
		})
	}
}

// A subscriber that the server has cut off because it reads too slowly comes back.
func TestAnOutputBufferThatOverflows(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	s.Do(t, "CONFIG", "SET", "client-output-buffer-limit", "pubsub 32kb 16kb 1")
	n := newSubs(t, s.Client(t))
	r := subscribed(t, n, "k")
	for range 3 {
		s.Do(t, "EVAL", "for i = 1, 100 do redis.call('PUBLISH', KEYS[1], ARGV[1]) end", 1, "k", strings.Repeat("x", 10<<10))
		r.until(Unsubscribed, "")
		r.until(Subscribed, "")
	}
	publish(t, s, "k", "small")
	r.until(Message, "small")
}

// A server that stops, without closing connections, is noticed; when it continues, so do the
// watches.
func TestAServerThatFallsSilent(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	p := redistest.StartProxy(t, s.Addr())
	n := newSubs(t, s.Client(t, at(p.Addr()), quick))
	hasten(n)
	r := subscribed(t, n, "k")

	_ = s.Stop()
	r.want(Unsubscribed, "")
	_ = s.Cont()
	r.want(Subscribed, "")

	p.BlackHole(true)
	r.want(Unsubscribed, "")
	p.BlackHole(false)
	r.want(Subscribed, "")

	_ = s.Kill()
	r.want(Unsubscribed, "")
	_ = s.Restart()
	r.want(Subscribed, "")
	publish(t, s, "k", "x")
	r.want(Message, "x")
}

// Many keys at once work, even when the connection breaks.
func TestTenThousandKeys(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newSubs(t, s.Client(t))
	hasten(n)
	const keys = 10000
	var all [keys]*recorder
	var watches [keys]*Watch
	for i := range all {
		all[i] = &recorder{t: t, heard: make(chan Event, 4)}
		watches[i] = watchAs(n, fmt.Sprint("k", i), "", all[i])
	}
	for _, r := range all {
		r.want(Subscribed, "")
	}
	if got := timesCalled(t, s, "subscribe"); got > keys/10 {
		t.Errorf("%d SUBSCRIBEs: no batches", got)
	}
	s.Do(t, "CLIENT", "KILL", "TYPE", "pubsub")
	for i, r := range all {
		r.want(Unsubscribed, "")
		r.want(Subscribed, "")
		if i%1000 == 0 {
			publish(t, s, fmt.Sprint("k", i), "x")
			r.want(Message, "x")
		}
	}
	for _, w := range watches {
		w.Stop()
	}
	wantNothing(t, n, s)
}

// Watches that begin and end leave nothing, neither on the server nor here.
func TestWatchesThatComeAndGo(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newSubs(t, s.Client(t))
	hasten(n)
	n.topicIdle = 2 * time.Millisecond
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(g), 0))
			for i := range 1000 {
				key := fmt.Sprint("hot", rnd.IntN(3))
				if i%2 == 0 {
					key = fmt.Sprint("cold", g, i)
				}
				r := newRecorder(t)
				w := watchAs(n, key, "", r)
				switch rnd.IntN(3) {
				case 0:
					r.hears(Subscribed, "")
				case 1:
					time.Sleep(time.Duration(rnd.IntN(3)) * time.Millisecond)
				}
				w.Stop()
			}
		})
	}
	wg.Wait()
	wantNothing(t, n, s)
}

// Nothing accumulates for a server that cannot be reached.
func TestWatchesOfADeadServerComeAndGo(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newSubs(t, s.Client(t, at(redistest.RefusedAddr(t)), quick))
	before := runtime.NumGoroutine()
	for i := range 10000 {
		watchAs(n, fmt.Sprint("k", i), "", newRecorder(t)).Stop()
	}
	if got := topics(n); got != 0 {
		t.Errorf("%d topics", got)
	}
	if after := runtime.NumGoroutine(); after > before+100 { // other tests run too
		t.Errorf("%d goroutines, %d before", after, before)
	}
	wantNothing(t, n)
}

// An OnEvent may stop its own watch and begin others. No event is delivered afterwards.
func TestStopInsideOnEvent(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := newSubs(t, s.Client(t))
	r, next := newRecorder(t), newRecorder(t)
	var w atomic.Pointer[Watch]
	begun := make(chan struct{})
	r.hook = func(s Kind) {
		<-begun
		if s == Message {
			w.Load().Stop()
			t.Cleanup(watchAs(n, "k", "", next).Stop)
		}
	}
	w.Store(watchAs(n, "k", "", r))
	close(begun)
	r.want(Subscribed, "")
	s.Do(t, "EVAL", "for i = 1, 100 do redis.call('PUBLISH', KEYS[1], i) end", 1, "k")
	r.want(Message, "1")
	next.want(Subscribed, "")
	next.until(Message, "100")
	if len(r.heard) != 0 {
		t.Errorf("received %v after Stop", <-r.heard)
	}
}

// A slow listener gets Subscribed, to check again, instead of every event.
func TestAFloodOfNoticesIsCutShort(t *testing.T) {
	w := &Watch{subs: &Subscriptions{}, delivering: true}
	w.notifyLocked(Event{Kind: Subscribed})
	w.events = nil // it has been told
	for i := range 10 * maxEvents {
		w.notifyLocked(Event{Message, fmt.Sprint(i)})
	}
	if len(w.events) > maxEvents || w.events[0].Kind != Subscribed {
		t.Errorf("%d wait, the first is %v", len(w.events), w.events[0])
	}
	if last := w.events[len(w.events)-1]; last.Text != fmt.Sprint(10*maxEvents-1) {
		t.Errorf("the last one is %v", last)
	}
}

// A listener that knows nothing of the subscription yet is told nothing of it by a flood.
func TestAFloodSaysNothingThatIsNotKnown(t *testing.T) {
	w := &Watch{subs: &Subscriptions{}, delivering: true}
	for i := range 10 * maxEvents {
		w.notifyLocked(Event{Message, fmt.Sprint(i)})
	}
	if len(w.events) != maxEvents {
		t.Errorf("%d wait", len(w.events))
	}
	for _, e := range w.events {
		if e.Kind != Message {
			t.Fatalf("received %v", e)
		}
	}
}

// Each node has subscriptions of its own, and i tells which.
func TestTwoNodesDoNotMix(t *testing.T) {
	t.Parallel()
	a, b := redistest.StartServer(t), redistest.StartServer(t)
	na, nb := newSubs(t, a.Client(t)), newSubs(t, b.Client(t))
	ra, rb := subscribed(t, na, "k"), subscribed(t, nb, "k")
	publish(t, a, "k", "a")
	publish(t, b, "k", "b")
	ra.want(Message, "a")
	rb.want(Message, "b")
	_ = a.Kill()
	ra.want(Unsubscribed, "")
	publish(t, b, "k", "b2")
	rb.want(Message, "b2")
}

// Close ends everything, whatever the connection is doing, and a later Watch receives nothing.
func TestCloseEndsWatches(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	stopped := redistest.StartServer(t)
	p := redistest.StartProxy(t, stopped.Addr())
	for name, client := range map[string]*redis.Client{
		"confirmed": s.Client(t),
		"refused":   s.Client(t, at(redistest.RefusedAddr(t)), quick),
		"silent":    s.Client(t, at(redistest.BlackHole(t)), quick),
		"stopped":   s.Client(t, at(p.Addr()), quick),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newSubs(t, client)
			r := newRecorder(t)
			var all []*Watch
			for i := range 100 {
				all = append(all, watchAs(n, fmt.Sprint("k", i), "", r0(t)))
			}
			all = append(all, watchAs(n, "k", "", r))
			switch name {
			case "confirmed":
				r.want(Subscribed, "")
			case "refused":
				r.want(Unsubscribed, "")
			case "stopped":
				r.want(Subscribed, "")
				p.HoldRequests()
				defer p.ReleaseRequests()
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if err := n.Close(ctx); err != nil {
				t.Error(err)
			}
			all = append(all, watchAs(n, "late", "", r))
			for _, w := range all {
				w.Stop()
			}
			if topics(n) != 0 {
				t.Error("topics are left")
			}
			if name == "confirmed" {
				publishNobody(t, s, "k")
			}
		})
	}
}

func r0(t *testing.T) *recorder { return &recorder{t: t, heard: make(chan Event)} }

func publishNobody(t *testing.T, s *redistest.Server, key string) {
	t.Helper()
	redistest.Eventually(t, patience, "nobody is subscribed", func() bool {
		return s.Do(t, "PUBLISH", key, "") == int64(0)
	})
}

// Watch, Stop and Close may meet in any order.
func TestWatchAgainstClose(t *testing.T) {
	t.Parallel()
	m := redistest.StartMini(t)
	c := redistest.MiniClient(t, m)
	for range 200 {
		of, err := node.New(c, time.Second, false)
		if err != nil {
			t.Fatal(err)
		}
		n := New(of, func(string) {})
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for i := range 5 {
					w := watchAs(n, fmt.Sprint("k", i), "", r0(t))
					if i%2 == 0 {
						w.Stop()
					}
				}
			})
		}
		wg.Go(func() {
			time.Sleep(rand.N(2 * time.Millisecond))
			if err := n.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		n.wg.Wait()
		if err := of.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// A reply of the wrong form ends the connection; the next one is not tried in a hot loop.
func TestAnswersThatDoNotFit(t *testing.T) {
	t.Parallel()
	confirm := func(kind, key string) string {
		return fmt.Sprintf("*3\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n:1\r\n", len(kind), kind, len(key), key)
	}
	for name, answer := range map[string]string{
		"another channel":   confirm("subscribe", "other"),
		"one too many":      confirm("subscribe", "k") + confirm("subscribe", "k"),
		"another kind":      confirm("psubscribe", "k") + "+PONG\r\n+PONG\r\n",
		"a number":          ":5\r\n",
		"loading":           "-LOADING Redis is loading the dataset in memory\r\n",
		"an error too many": "-ERR what\r\n-ERR what\r\n-ERR what\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int32
			f := redistest.StartFake(t, func(cmd []string) string {
				switch {
				case cmd[0] == "ping":
					return "+PONG\r\n"
				case cmd[0] != "subscribe":
					return "+OK\r\n"
				case asked.Add(1) == 1:
					return answer
				}
				return confirm("subscribe", cmd[1])
			})
			n := newSubs(t, f.Client(t))
			n.bar = 50 * time.Millisecond
			r := watch(t, n, "k")
			r.until(Unsubscribed, "")
			r.until(Subscribed, "")
			if got := asked.Load(); got > 5 {
				t.Errorf("asked %d times", got)
			}
		})
	}
}

// In virtual time: confirmation, notice, the linger, a node that stalls and one that is cut.
func TestWatchInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		c := m.Client(t)
		n := newSubs(t, c)
		r := newRecorder(t)
		w := watchAs(n, "k", "", r)
		r.want(Subscribed, "")
		if err := c.Publish(t.Context(), "k", "x").Err(); err != nil {
			t.Fatal(err)
		}
		r.want(Message, "x")

		m.Cut()
		r.want(Unsubscribed, "")
		r.want(Subscribed, "")

		m.Stall(true)
		r.want(Unsubscribed, "")
		m.Stall(false)
		r.want(Subscribed, "")

		w.Stop()
		time.Sleep(topicIdleTime - time.Millisecond)
		synctest.Wait()
		if got := m.Mini.PubSubNumSub("k")["k"]; got != 1 {
			t.Errorf("%d subscribers before the linger is over", got)
		}
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		if got := m.Mini.PubSubNumSub("k")["k"]; got != 0 {
			t.Errorf("%d subscribers after the linger", got)
		}
		time.Sleep(connIdleTime + 2*pulseTime)
		synctest.Wait()
		wantNothing(t, n)
	})
}

// How long a connection took to be made says nothing about how soon it answers.
func TestAConnectionThatWasMadeSlowlyIsNotSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		dials := 0
		c := m.Client(t, func(o *redis.Options) {
			dial := o.Dialer
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				dials++
				select {
				case <-time.After(3 * time.Second): // two lost SYNs
				case <-ctx.Done():
					return nil, ctx.Err()
				}
				return dial(ctx, network, addr)
			}
		})
		began := time.Now()
		subscribed(t, newSubs(t, c), "k")
		if dials != 1 {
			t.Errorf("%d dials, in %v", dials, time.Since(began))
		}
	})
}

// Each ping goes out a pulse after the answer to the one before.
func TestAPingPerPulse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		subscribed(t, newSubs(t, m.Client(t)), "k")
		synctest.Wait()
		before := m.Mini.CommandCount()
		time.Sleep(10*pulseTime + time.Millisecond)
		synctest.Wait()
		if got := m.Mini.CommandCount() - before; got != 10 {
			t.Errorf("%d pings in 10 pulses", got)
		}
	})
}

// A connection on which messages arrive is not silent, however long the answer behind them takes.
func TestMessagesBeforeAnAnswerAreASignOfLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newSubs(t, m.Client(t))
		r := subscribed(t, n, "k")
		n.mu.Lock()
		sc := n.topics["k"].home.conn
		sc.sent = append(sc.sent, &command{verb: ping, sent: time.Now()}) // it is not written, and not answered
		n.mu.Unlock()
		for range 10 {
			time.Sleep(n.node.TransportTime() - time.Millisecond) // the bubble's time
			if got := m.Mini.Publish("k", "x"); got != 1 {
				t.Fatalf("%d have received it", got)
			}
			r.want(Message, "x")
		}
		r.want(Unsubscribed, "") // now that nothing comes any more
		r.want(Subscribed, "")
	})
}

// A channel that was refused for a moment does not wait behind one that was refused for long.
func TestRefusalsEndInTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newSubs(t, redistest.StartMemNode(t, "10.0.0.1:6379").Client(t))
		long, short := subscribed(t, n, "long"), subscribed(t, n, "short")
		n.mu.Lock()
		home := n.topics["long"].home
		home.conn.drop = append(home.conn.drop, "long", "short") // as laterLocked has it
		home.refuseLocked(n.topics["long"], time.Now().Add(barTime))
		home.refuseLocked(n.topics["short"], time.Now().Add(backoffMax))
		n.mu.Unlock()
		home.wake()
		time.Sleep(2 * backoffMax) // the bubble's time
		if len(short.heard) != 1 || len(long.heard) != 0 {
			t.Errorf("%d and %d events", len(short.heard), len(long.heard))
		}
		time.Sleep(barTime) // the bubble's time
		long.want(Subscribed, "")
	})
}

// Nothing is kept for a watch that has ended while the master of its key was looked up.
func TestAWatchThatEndsWhileItsMasterIsLookedUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newSubs(t, redistest.StartMemNode(t, "10.0.0.1:6379").Client(t))
		for _, err := range []error{nil, io.EOF} {
			gone := &topic{key: "k", state: removed}
			n.resolved(gone, n.node.Server(), err)
			n.mu.Lock()
			if gone.home != nil || gone.place != nil || len(n.subscribers) != 0 || n.unresolved.Len() != 0 {
				t.Errorf("%v: it is served", err)
			}
			n.mu.Unlock()
		}
	})
}

// A server that answers late is not sent more than its output buffer has room for answers to, and the rest as soon as
// it has answered.
func TestNoMoreIsRequestedThanTheServerMayAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newSubs(t, m.Client(t))
		subscribed(t, n, "first")
		m.Stall(true)
		var all []*recorder
		for i := range 3 * maxOpen {
			all = append(all, watch(t, n, fmt.Sprint("k", i)))
		}
		synctest.Wait()
		n.mu.Lock()
		open := n.topics["first"].home.conn.open
		n.mu.Unlock()
		if open == 0 || open >= maxOpen+maxChannels { // the last command may go beyond it
			t.Errorf("%d answers are awaited, the limit is %d", open, maxOpen)
		}
		m.Stall(false)
		synctest.Wait() // no time passes, not even that of a pulse
		for i, r := range all {
			if r.state() != Subscribed {
				t.Fatalf("%d of %d are subscribed", i, len(all))
			}
		}
	})
}

// A master may end a subscription, because its slot has moved, in the moment in which we are about
// to end it: its message resembles the reply to a command that is not written yet. The command is
// written unchanged all the same; without its channel it would end all subscriptions.
func TestACommandIsWrittenAsItWasMade(t *testing.T) {
	s := redistest.StartServer(t)
	n := newSubs(t, s.Client(t))
	watch(t, n, "k").want(Subscribed, "")
	other := watch(t, n, "other")
	other.want(Subscribed, "")
	ns := n
	ns.mu.Lock()
	l := ns.topics["k"].home.conn
	ns.topics["k"].state = unsubscribing
	l.drop = append(l.drop, "k")
	c := l.composeLocked(time.Now())
	ns.mu.Unlock()
	if _, ok := l.take(&redis.Subscription{Kind: "unsubscribe", Channel: "k"}, nil); !ok {
		t.Fatal("the link has ended")
	}
	if err := l.send(c); err != nil {
		t.Fatal(err)
	}
	redistest.Eventually(t, patience, "the server has ended a subscription", func() bool {
		return s.CommandCalls(t)["unsubscribe"] > 0
	})
	redistest.Eventually(t, patience, "the other key is subscribed", func() bool {
		return s.Do(t, "PUBLISH", "other", "x") == int64(1)
	})
	other.want(Message, "x") // and has been all the time
}

// What the new master publishes is received, though the old one, which Sentinels have replaced, continues.
func TestSubscriptionsGoToTheMasterThatSentinelsName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := redistest.StartMemNode(t, "10.0.0.1:6379"), redistest.StartMemNode(t, "10.0.0.2:6379")
		var master atomic.Pointer[redistest.MemNode]
		master.Store(a)
		n := newSubs(t, redistest.SentinelClient(t, master.Load))
		target, entry := new(node.Target), new(node.Entry)
		target.Init("k", "nobody", "nobody")
		entry.Init(n.node, target, 0)
		entry.Release(new(node.RequestBuf), nil, false, &node.TurnPass{Contender: "nobody"}) // now the node begins to ask
		r := subscribed(t, n, "k")
		time.Sleep(2 * pulseTime) // after the first answer
		before := r.state()
		master.Store(b)
		time.Sleep(3 * pulseTime)
		synctest.Wait()
		if got := b.Mini.PubSubNumSub("k")["k"]; before != Subscribed || r.state() != Subscribed || got != 1 {
			t.Errorf("%d subscribers at the new master; %v before, %v now", got, before, r.state())
		}
	})
}
