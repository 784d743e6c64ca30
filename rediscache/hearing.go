package rediscache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/link"
	"github.com/redis/go-redis/v9"
)

// With an Options.Local above a second a process hears of every change of an entry: the server tells it which
// ones were written or deleted, have expired, or were evicted or flushed (CLIENT TRACKING, broadcasting), on
// a connection for that.
//
// That may end in silence, or lead to a server that was a master once. So the process writes a key of its own
// now and then, by rdb as all changes are written, and waits until it hears of that: a pulse. The server
// tells of changes in their order, so all that were made before the pulse was sent have been heard of by
// then. The local tier serves nothing that was current longer ago than a second by that account (see
// hot.Tier.Heard), whatever fails here.
//
//	process   SET pulse ---------------+-------> hears of pulse: all changes before SET are known
//	server     ... change, change, executed ...
//
// A connection begins with the tracking, then the tier is cleared, and only then there are pulses: what has
// changed since the last connection was not heard of.
//
// The simpler design, messages that are published by who invalidates, was rejected: it does not tell of what
// expires, is evicted, flushed, or deleted by hand, and costs each change a command.

const (
	pulseEvery  = 250 * time.Millisecond
	pulseKept   = 10 * time.Second // the key of one
	pulseMost   = 3 * time.Second  // until one was heard, or the connection is made anew
	refusedFor  = time.Minute      // until what was refused is tried again, also a command
	pulsePrefix = "flightlock:{pulse}:"
)

// tier is a hot.Tier.
type tier interface {
	Remove(key string)
	Clear()
	Heard(then time.Time)
}

// hearing is how a Cache hears of changes.
type hearing struct {
	s    *server
	tier tier
	log  func(level slog.Level, msg string, args ...any)
	name string // what the keys of its pulses begin with
	link *link.Link
	once sync.Once // start

	mu      sync.Mutex // guards what follows
	on      bool       // there is a connection, since which the tier was cleared
	refused error      // why there is no tracking
	pulse   string     // the key of the last one; "": it is not waited for
	sent    time.Time  // before it was
}

// newHearing makes one for a Cache at s. Nothing is sent before start.
func newHearing(s *server, t tier, log func(level slog.Level, msg string, args ...any)) *hearing {
	h := &hearing{s: s, tier: t, log: log, name: pulsePrefix + random() + ":"}
	client, _ := s.rdb.(*redis.Client) // validated
	h.link = link.New(link.Options{
		Of: client.Options(), Timeout: s.writes, Boot: h.boot, Attend: h.attend, Pushed: h.pushed, Ended: h.ended,
	})
	return h
}

// start begins to hear, until the server is closed. Calls after the first do nothing.
func (h *hearing) start() { h.once.Do(func() { h.s.tasks.Go(h.run) }) }

func (h *hearing) run() {
	defer h.link.Close()
	h.link.Wake()
	for n := 0; h.s.ended.Err() == nil; n++ {
		pause := pulseEvery
		if !h.beat(n) {
			pause = refusedFor
		}
		select {
		case <-time.After(pause):
		case <-h.s.ended.Done():
		}
	}
}

// beat makes a pulse, if there is a connection and the last one is not waited for any more. It reports false
// if the server has refused that, or the tracking.
func (h *hearing) beat(n int) bool {
	key, now := fmt.Sprint(h.name, n), clock.Now()
	h.mu.Lock()
	refused, waits := h.refused, h.pulse != ""
	late, sends := waits && now.Sub(h.sent) >= pulseMost, h.on && !waits
	if h.refused = nil; late {
		h.pulse = ""
	} else if sends {
		h.pulse, h.sent = key, now
	}
	h.mu.Unlock()
	switch {
	case refused != nil:
		h.deaf(refused)
		h.link.Moved(refused)
		return false
	case late:
		h.link.Moved(errNotHeard)
	case sends:
		_, err := do(h.s.ended, h.s, pulseMost, func(ctx context.Context) (string, error) {
			return h.s.rdb.Set(ctx, key, "", pulseKept).Result()
		})
		if err != nil {
			h.over(key)
		}
		if conn.NoRights(err) {
			h.deaf(err)
			return false
		}
	}
	return true
}

// deaf logs what the server has refused.
func (h *hearing) deaf(refused error) {
	args := []any{"prefix", h.s.prefix, "error", refused}
	if conn.NoRights(refused) {
		args = append(args, "fix",
			"give the user ~"+pulsePrefix+"* &"+pulsePrefix+"* +client|tracking +subscribe +ping")
	}
	h.log(slog.LevelWarn,
		"flightlock: the local tier of a Cache keeps values for 1s only: it does not hear of changes", args...)
}

var errNotHeard = errors.New("the server does not tell of changes")

// boot has the server tell of changes. It is Boot of the link.
func (h *hearing) boot(on *link.Session) error {
	err := on.Pushes()
	if err == nil {
		_, err = on.Exec("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", h.s.prefix, "PREFIX", h.name)
	}
	if err != nil && !conn.IsReply(err) && !errors.Is(err, link.ErrNoPushes) {
		return err
	}
	h.tier.Clear()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.on, h.refused = true, err
	return nil
}

// ended has another connection made. It is Ended of the link.
func (h *hearing) ended(*link.Session) {
	h.mu.Lock()
	h.on, h.pulse = false, ""
	h.mu.Unlock()
	h.link.Wake()
}

// attend makes the connection one of those with subscriptions: a server ends these when too much waits for
// them, as for a process that is stopped, and others never. It is Attend of the link.
func (h *hearing) attend(on *link.Session) time.Duration {
	on.Listen("SUBSCRIBE", h.name, func(error) {})
	return 0
}

// pushed is Pushed of the link.
func (h *hearing) pushed(_ *link.Session, items []link.Value) {
	switch {
	case len(items) != 2 || string(items[0].Text) != "invalidate":
		return
	case items[1].Kind == link.Nil: // everything was flushed
		h.tier.Clear()
	}
	for _, x := range items[1].Items {
		if key, is := strings.CutPrefix(string(x.Text), h.s.prefix); is {
			h.tier.Remove(key)
		} else if sent, is := h.over(string(x.Text)); is {
			h.tier.Heard(sent)
		}
	}
}

// over ends the wait for a pulse, and returns when that was sent.
func (h *hearing) over(pulse string) (sent time.Time, is bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if is = h.pulse == pulse; is {
		h.pulse = ""
	}
	return h.sent, is
}
