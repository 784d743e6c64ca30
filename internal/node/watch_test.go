package node

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

// heard is what one watch has received, in order.
type heard struct {
	mu  sync.Mutex
	all []string
}

func (h *heard) OnEvent(_ int, e Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, [...]string{"", "on", "off", "got "}[e.Kind]+e.Text)
}

func (h *heard) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return strings.Join(h.all, ",")
}

// want compares what was heard since the last time, in a bubble.
func (h *heard) want(t *testing.T, want string) {
	t.Helper()
	synctest.Wait()
	if got := h.String(); got != want {
		t.Errorf("heard %q, want %q", got, want)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = nil
}

// until waits until that was heard, and nothing else, since the last time.
func (h *heard) until(t *testing.T, want string) {
	t.Helper()
	redistest.Eventually(t, patience, "heard "+want, func() bool { return h.String() == want })
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = nil
}

// inbox is a watch of a client's inbox, for one of those who wait.
func inbox(t *testing.T, n *Node, name string) *heard {
	h := &heard{}
	w, _ := n.Watch(Inbox+"me", name, 0, h)
	t.Cleanup(w.Stop)
	return h
}

// messages runs test with a memory node, where time is the bubble's.
func messages(t *testing.T, test func(t *testing.T, m *redistest.MemNode, n *Node)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		test(t, m, startNode(t, m.Client(t), 50*time.Millisecond))
	})
}

// A message is for whom it names; the inbox is subscribed once for all, over the link, and for a while after
// that.
func TestMessagesOfAnInbox(t *testing.T) {
	messages(t, func(t *testing.T, m *redistest.MemNode, n *Node) {
		var votes []string
		n.Vote = func(text string) { votes = append(votes, text) }
		one, two := &heard{}, inbox(t, n, "2")
		w, subscribed := n.Watch(Inbox+"me", "1", 0, one)
		if subscribed {
			t.Error("subscribed before it was asked for")
		}
		one.want(t, "on")
		two.want(t, "on")
		if _, subscribed = n.Watch(Inbox+"me", "3", 0, &heard{}); !subscribed {
			t.Error("not subscribed")
		}
		for _, text := range []string{"1 turn", "2 turn", "22 turn", "4 turn", "1 grant x"} {
			if m.Mini.Publish(Inbox+"me", text) != 1 {
				t.Error("nobody hears")
			}
		}
		m.Mini.Publish(Inbox+"other", "1 turn")
		one.want(t, "got 1 turn")
		two.want(t, "got 2 turn")
		if fmt.Sprint(votes) != "[1 grant x]" {
			t.Errorf("votes: %q", votes)
		}
		w.Stop()
		w.Stop()
		m.Mini.Publish(Inbox+"me", "1 turn")
		one.want(t, "")
		if got := m.Mini.Server().ClientsLen(); got != 1 {
			t.Errorf("%d connections", got)
		}
	})
}

// A subscription ends a while after its last watch, and is kept for one that comes meanwhile.
func TestASubscriptionOutlivesItsWatch(t *testing.T) {
	messages(t, func(t *testing.T, m *redistest.MemNode, n *Node) {
		subscribed := func() bool { return len(m.Mini.PubSubChannels(Inbox+"*")) > 0 }
		for range 2 {
			h := &heard{}
			w, _ := n.Watch(Inbox+"me", "1", 0, h)
			h.want(t, "on")
			w.Stop()
			time.Sleep(4 * time.Second)
			w, on := n.Watch(Inbox+"me", "1", 0, h)
			if !on || !subscribed() {
				t.Error("not subscribed any more")
			}
			time.Sleep(10 * time.Second)
			if !subscribed() {
				t.Error("it ends though somebody watches")
			}
			w.Stop()
			time.Sleep(10 * time.Second)
			synctest.Wait()
			if subscribed() {
				t.Error("still subscribed")
			}
			h.want(t, "")
		}
		commands := m.Mini.CommandCount()
		time.Sleep(time.Minute)
		if got := m.Mini.CommandCount(); got != commands {
			t.Errorf("%d commands though nobody watches", got-commands)
		}
	})
}

// A server may refuse PING: it has confirmed the subscription all the same.
func TestMessagesWithoutTheRightToPing(t *testing.T) {
	messages(t, func(t *testing.T, m *redistest.MemNode, n *Node) {
		m.Mini.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
			if cmd == "PING" {
				c.WriteError("NOPERM no")
			}
			return cmd == "PING"
		})
		h := inbox(t, n, "1")
		h.want(t, "on")
		if _, subscribed := n.Watch(Inbox+"me", "2", 0, &heard{}); !subscribed {
			t.Error("not subscribed")
		}
		m.Mini.Publish(Inbox+"me", "1 turn")
		h.want(t, "got 1 turn")
	})
}

// A link that ends after the confirmation, and before the answer to the PING behind it, is as one that ends
// later.
func TestALinkThatEndsRightAfterAConfirmation(t *testing.T) {
	messages(t, func(t *testing.T, m *redistest.MemNode, n *Node) {
		m.Mini.Server().SetPreHook(func(_ *server.Peer, cmd string, _ ...string) bool { return cmd == "PING" })
		h := inbox(t, n, "1")
		h.want(t, "on")
		time.Sleep(140 * time.Millisecond) // it is silent after 150 ms
		m.Down(true)
		h.want(t, "off")
	})
}

// A server, or a proxy, that ends connections because of a subscription is not dialled all the time, and
// grants locks.
func TestSubscriptionsThatEndTheConnection(t *testing.T) {
	for _, by := range []string{"SUBSCRIBE", "PING"} {
		t.Run(by, func(t *testing.T) {
			messages(t, func(t *testing.T, m *redistest.MemNode, n *Node) {
				m.Mini.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
					if cmd == by {
						c.Close()
					}
					return cmd == by
				})
				eventuallyGranted(t, n, "k")
				dials := m.Mini.TotalConnectionCount()
				inbox(t, n, "1")
				refused := 0
				for i := range 100 {
					time.Sleep(100 * time.Millisecond)
					a := newAttempt(t, n, fmt.Sprint("k", i))
					if rep := <-a.acquire().heard; rep.Kind != Granted {
						refused++
					}
					<-a.release().heard
				}
				if dials = m.Mini.TotalConnectionCount() - dials; dials > 25 || refused > 30 {
					t.Errorf("%d dials, and %d of 100 refused", dials, refused)
				}
			})
		})
	}
}

// What a server refuses is not asked for with each wait.
func TestARefusedSubscriptionIsNotAskedForWithEachWatch(t *testing.T) {
	messages(t, func(t *testing.T, m *redistest.MemNode, n *Node) {
		asked := 0
		m.Mini.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
			if cmd == "SUBSCRIBE" {
				asked++
				c.WriteError("NOPERM no")
			}
			return cmd == "SUBSCRIBE"
		})
		for range 100 {
			w, _ := n.Watch(Inbox+"me", "1", 0, &heard{})
			time.Sleep(10 * time.Millisecond)
			w.Stop()
			time.Sleep(10 * time.Millisecond)
		}
		if asked != 1 {
			t.Errorf("asked %d times", asked)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := len(n.topics.all); got > 0 {
			t.Errorf("%d topics are kept", got)
		}
	})
}

// A link that is lost while somebody waits is made again at once, though no request waits.
func TestALinkIsMadeAgainForWhoWatches(t *testing.T) {
	messages(t, func(t *testing.T, m *redistest.MemNode, n *Node) {
		h := inbox(t, n, "1")
		h.want(t, "on")
		time.Sleep(time.Second) // a link that has just been made is not made again at once
		m.Cut()
		h.want(t, "off,on")
		m.Mini.Publish(Inbox+"me", "1 turn")
		h.want(t, "got 1 turn")
		m.Stall(true) // in silence
		// a look that it has answered before, and one that it has not
		time.Sleep(3*pulseTime + conn.TransportTimeout)
		h.want(t, "off")
		m.Stall(false)
		time.Sleep(time.Second)
		h.want(t, "on")
	})
}

// Who watches has no server dialled more often that is suspended, and hears when it is back.
func TestWatchesDoNotDialASuspendedServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		m.Down(true)
		var dials atomic.Int64
		n := startNode(t, m.Client(t, redistest.CountDials(&dials)), 50*time.Millisecond)
		if n.Ready(t.Context()) == nil || !n.Suspended() {
			t.Error("the node is not suspended")
		}
		h := inbox(t, n, "1")
		dials.Store(0)
		const lasts = 10 * time.Second
		time.Sleep(lasts)
		if got, most := dials.Load(), int64(lasts/(250*time.Millisecond)); got > most || got < most/2 {
			t.Errorf("%d dials in %v, want %d", got, lasts, most)
		}
		m.Down(false)
		time.Sleep(time.Second)
		h.want(t, "on")
	})
}

// A listener that reads the value after each Subscribed and each Message, and at no other time, sees every
// change in the end, whatever happens to the connection.
func TestNoWakeUpIsLost(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			messages(t, func(t *testing.T, m *redistest.MemNode, n *Node) {
				rng := rand.New(rand.NewPCG(seed, 0))
				m.SetDelay(time.Duration(rng.IntN(20)) * time.Millisecond)
				for round := range 30 {
					noticed(t, m, n, fmt.Sprint(round%3), rng)
				}
			})
		})
	}
}

// looker is a Listener that reads a value after each event but Unsubscribed.
type looker struct {
	value *atomic.Bool
	saw   atomic.Bool
}

func (l *looker) OnEvent(_ int, e Event) {
	if e.Kind != Unsubscribed && l.value.Load() {
		l.saw.Store(true)
	}
}

// noticed has a value change somewhere between other things that happen, and a watch notice it.
func noticed(t *testing.T, m *redistest.MemNode, n *Node, name string, rng *rand.Rand) {
	pause := func(most time.Duration) { time.Sleep(time.Duration(rng.Int64N(int64(most)))) }
	var value atomic.Bool
	l := &looker{value: &value}
	w, subscribed := n.Watch(Inbox+"me", name, 0, l)
	if subscribed {
		l.OnEvent(0, Event{Kind: Subscribed})
	}
	for range rng.IntN(4) {
		switch pause(100 * time.Millisecond); rng.IntN(3) {
		case 0:
			m.Cut()
		case 1:
			m.Stall(true)
			pause(time.Second)
			m.Stall(false)
		case 2:
			m.Down(true)
			pause(time.Second)
			m.Down(false)
		}
	}
	pause(100 * time.Millisecond)
	value.Store(true)
	m.Mini.Publish(Inbox+"me", name+" turn")
	if rng.IntN(3) == 0 {
		m.Cut()
	}
	time.Sleep(10 * time.Second)
	if !l.saw.Load() {
		t.Error("a change was never noticed")
	}
	w.Stop()
	pause(10 * time.Second) // the subscription may end meanwhile, or be about to
}

func TestConnectionsThatAreKilledHeal(t *testing.T) {
	t.Parallel()
	s := redistest.StartServer(t)
	n := startNode(t, s.Client(t), 50*time.Millisecond)
	h := inbox(t, n, "1")
	h.until(t, "on")
	for range 4 {
		s.Do(t, "CLIENT", "KILL", "TYPE", "pubsub")
		h.until(t, "off,on")
		s.Do(t, "PUBLISH", Inbox+"me", "1 turn")
		h.until(t, "got 1 turn")
	}
}

// What the new master publishes is received, though the old one, which Sentinels have replaced, continues.
func TestSubscriptionsGoToTheMasterThatSentinelsName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes := redistest.StartMemNodes(t, 2)
		var master atomic.Pointer[redistest.MemNode]
		master.Store(nodes[0])
		h := inbox(t, startNode(t, redistest.SentinelClient(t, master.Load), 50*time.Millisecond), "1")
		time.Sleep(2 * followEvery)
		first := h.String() // a connection that is older than the Sentinels' first answer is given up: see follow
		if first != "on" && first != "on,off,on" {
			t.Errorf("heard %q", first)
		}
		h.want(t, first)
		master.Store(nodes[1])
		time.Sleep(2 * followEvery)
		h.want(t, "off,on")
		nodes[0].Mini.Publish(Inbox+"me", "1 old")
		nodes[1].Mini.Publish(Inbox+"me", "1 new")
		h.want(t, "got 1 new")
	})
}

// refusing is a server that agrees on RESP3, as far as it is to, and answers SUBSCRIBE with that.
func refusing(t *testing.T, resp3 bool, subscribe string) (*Node, func() []string) {
	var mu sync.Mutex
	var got, reported []string
	f := redistest.StartFake(t, func(cmd []string) string {
		mu.Lock()
		got = append(got, strings.Join(cmd, " "))
		mu.Unlock()
		switch {
		case cmd[0] == "SUBSCRIBE":
			return subscribe
		case len(cmd) > 1 && cmd[0] == "PING":
			return fmt.Sprintf("$%d\r\n%s\r\n", len(cmd[1]), cmd[1])
		}
		return "+OK\r\n"
	})
	f.SetRESP3(resp3)
	c := redis.NewClient(&redis.Options{Addr: f.Addr()})
	t.Cleanup(func() { _ = c.Close() }) // after the node
	n := startNode(t, c, 50*time.Millisecond)
	n.Unheard = func(_ string, err error) {
		mu.Lock()
		defer mu.Unlock()
		reported = append(reported, fmt.Sprint(err))
	}
	h := inbox(t, n, "1")
	redistest.Eventually(t, patience, "it is reported that there are no messages", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(reported) > 0
	})
	if h.String() != "" {
		t.Errorf("heard %s", h)
	}
	if err := n.Ready(t.Context()); err != nil {
		t.Error(err)
	}
	return n, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append(append([]string{}, reported...), got...)
	}
}

// Without RESP3, or the right to subscribe, nothing is asked for again and again, the link stays, and it is
// reported.
func TestServersThatSendNoMessages(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		resp3               bool
		answer, want, never string
	}{
		"no RESP3":    {false, "", link.ErrNoPushes.Error(), "SUBSCRIBE " + Inbox + "me"},
		"no right":    {true, "-NOPERM no\r\n", "NOPERM no", ""},
		"no commands": {true, "-ERR unknown command 'SUBSCRIBE'\r\n", "ERR unknown command 'SUBSCRIBE'", ""},
		"not a word":  {true, ":1\r\n", "place of replies", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, seen := refusing(t, c.resp3, c.answer)
			all := seen()
			if !strings.Contains(all[0], c.want) {
				t.Errorf("reported %q", all[0])
			}
			for _, x := range all[1:] {
				if x == c.never {
					t.Errorf("got %q", x)
				}
			}
		})
	}
}

// On a Cluster a watch is where polls of its key go: with a slot that moves, when connections are killed,
// with a master's new client. The subtests share one Cluster.
func TestWatchesOfACluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3)
	from, to := cluster.Servers()[0], cluster.Servers()[1]
	client := cluster.Client(t)
	n := startNode(t, client, 50*time.Millisecond)
	key := cluster.KeyOn(t, from, "moves")
	slot := cluster.SlotOf(t, key)
	watch := func(key string) *heard {
		h := &heard{}
		w, _ := n.Watch(key, "", 0, h)
		t.Cleanup(w.Stop)
		return h
	}
	poll := func(t *testing.T, key string) {
		t.Helper()
		redistest.Eventually(t, patience, "a poll has an answer", func() bool {
			a := newAttempt(t, n, key)
			rep := <-a.acquire().heard
			<-a.release().heard
			return rep.Kind == Granted
		})
	}
	publish := func(t *testing.T, s *redistest.Server, key, text string) {
		t.Helper()
		if got := s.Do(t, "SPUBLISH", key, text); got != int64(1) {
			t.Errorf("SPUBLISH reached %v", got)
		}
	}
	h, stays := watch(key), watch(cluster.KeyOn(t, to, "stays"))
	if h.String() != "" {
		t.Error("subscribed where nobody knows")
	}
	poll(t, key)
	poll(t, cluster.KeyOn(t, to, "stays"))
	h.until(t, "on")
	stays.until(t, "on")
	publish(t, from, key, "x")
	h.until(t, "got x")

	t.Run("a slot that moves", func(t *testing.T) {
		for range 3 {
			cluster.SetMigrating(t, slot, from, to)
			publish(t, from, key, "m")
			cluster.FinishMigration(t, slot, from, to)
			h.until(t, "got m,off")
			poll(t, key)
			h.until(t, "on")
			publish(t, to, key, "there")
			h.until(t, "got there")
			from, to = to, from
		}
	})
	t.Run("connections that are killed", func(t *testing.T) {
		for _, s := range cluster.Servers() {
			s.Do(t, "CLIENT", "KILL", "TYPE", "pubsub")
		}
		h.until(t, "off,on")
		publish(t, from, key, "x")
		h.until(t, "got x")
	})
	t.Run("a master's new client", func(t *testing.T) {
		fresh := redis.NewClient(&redis.Options{Addr: from.Addr()})
		t.Cleanup(func() { _ = fresh.Close() })
		redistest.Eventually(t, patience, "the slots are not read", func() bool {
			n.router.mu.Lock()
			defer n.router.mu.Unlock()
			none := !n.router.sweeping
			n.router.sweeping = true // the Cluster's client does not name that one
			return none
		})
		n.router.learn(uint16(slot), n.router.server(fresh)) // as when it is found by a poll
		h.until(t, "off,on")
		publish(t, from, key, "x")
		h.until(t, "got x")
	})
	t.Run("many", func(t *testing.T) {
		var all []*heard
		var stop []func()
		for i := range 1000 {
			key := fmt.Sprint("k", i)
			h := &heard{}
			w, _ := n.Watch(key, "", 0, h)
			all, stop = append(all, h), append(stop, w.Stop)
			poll(t, key)
		}
		for _, h := range all {
			h.until(t, "on")
		}
		for _, s := range stop {
			s()
		}
		redistest.Eventually(t, patience, "they have ended", func() bool {
			channels := 0
			for _, s := range cluster.Servers() {
				channels += len(s.Do(t, "PUBSUB", "SHARDCHANNELS").([]any))
			}
			return channels <= 2
		})
	})
	for _, s := range cluster.Servers() {
		if got := strings.Count(s.Do(t, "CLIENT", "LIST", "TYPE", "pubsub").(string), "\n"); got > 1 {
			t.Errorf("%d connections with subscriptions", got)
		}
	}
}

// A Cluster without sharded pub/sub, older than Redis 7, is asked for it once, however many keys are waited
// for.
func TestAnOldClusterIsLeftAlone(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 1, "--rename-command", "SSUBSCRIBE", "")
	s := c.Servers()[0]
	n := startNode(t, c.Client(t), 50*time.Millisecond)
	reported, before := make(chan error, 10), ""
	errors := func() string {
		_, rest, _ := strings.Cut(s.Do(t, "INFO", "errorstats").(string), "errorstat_ERR:")
		count, _, _ := strings.Cut(rest, "\r\n")
		return count
	}
	n.Unheard = func(_ string, err error) { reported <- err }
	for i := range 20 {
		key := fmt.Sprint("k", i)
		h := &heard{}
		w, _ := n.Watch(key, "", 0, h)
		t.Cleanup(w.Stop)
		a := newAttempt(t, n, key)
		<-a.acquire().heard
		<-a.release().heard
		if i == 0 {
			if err := <-reported; err == nil || !strings.Contains(err.Error(), "unknown command") {
				t.Errorf("reported %v", err)
			}
			before = errors()
		}
	}
	if after := errors(); after != before || before == "" {
		t.Errorf("errors: %s, then %s", before, after)
	}
}

// A vote counts only on a link whose boot has succeeded: what else is on that server, nobody knows.
func TestVotesOfLinksThatHaveNotBooted(t *testing.T) {
	t.Parallel()
	m := redistest.StartServer(t)
	n := startNode(t, m.Client(t), 50*time.Millisecond)
	votes := make(chan string, 10)
	n.Vote = func(text string) { votes <- text }
	n.SetGuard(Guard{Limit: time.Minute, Name: func() string {
		return fmt.Sprint("name", time.Now().UnixNano())
	}})
	h := inbox(t, n, "1")
	h.until(t, "on")
	publish := func(want int) {
		t.Helper()
		for _, text := range []string{"1 grant x", "1 turn"} {
			m.Do(t, "PUBLISH", Inbox+"me", text)
		}
		h.until(t, "got 1 turn")
		if got := len(votes); got != want {
			t.Errorf("%d votes, want %d", got, want)
		}
		for len(votes) > 0 {
			<-votes
		}
	}
	boot := func() error {
		done := make(chan error, 1)
		n.Boot("", func(_ Epoch, err error) { done <- err })
		return <-done
	}
	publish(1)
	m.Do(t, "FLUSHALL") // so that it has something to write
	m.Do(t, "CONFIG", "SET", "min-replicas-to-write", 1)
	if err := boot(); err == nil {
		t.Error("boot.lua is not refused")
	}
	publish(0)
	m.Do(t, "CONFIG", "SET", "min-replicas-to-write", 0)
	if err := boot(); err != nil {
		t.Error(err)
	}
	publish(1)
}

// A subscription that is confirmed when all watches have ended, as those of a client that closes at once do,
// says nothing of the server.
func TestASubscriptionBehindTheEndOfAllWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		n := newNode(t, m.Client(t))
		n.Unheard = func(_ string, err error) { t.Errorf("reported: %v", err) }
		newAttempt(t, n, "k").acquire().want(t, Granted)
		m.SetDelay(5 * time.Millisecond)
		inbox(t, n, "1")
		time.Sleep(2 * time.Millisecond) // it was asked for
		n.CloseWatches()
		time.Sleep(time.Second)
	})
}
