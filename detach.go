package flightlock

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/clock"
	"github.com/flightlock/flightlock/internal/flight"
	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/quorum"
)

// Detached is a lock that was detached from its holder, so that another process can attach it: see
// [Lock.Detach] and [Client.Attach]. MarshalText and UnmarshalText carry it there. The zero Detached is of no
// lock.
//
// It is a bearer secret: whoever has it, and may use the nodes, can have the lock. String, GoString, LogValue
// and the verbs of package fmt show the key and the deadline only.
type Detached struct {
	// nil: none. A func, because fmt does not print what one returns, wherever the Detached is
	of func() *detached
}

// detached is what a client has to know to attach.
type detached struct {
	key, owner string
	token, top int64 // top: the highest token that the lease has reserved; 0: unknown
	ttl        time.Duration
	until      time.Time
}

// Detach ends the lock in this process, and leaves its key on the nodes until its deadline, Lock.Until. Until
// then a Client with the same nodes and KeyPrefix, usually in another process, can have the lock by Attach;
// otherwise the key expires. Refresh the lock before if that may take long. The lock's Contexts end as after
// Release. Detach sends nothing, and never blocks on I/O.
//
// Errors: ErrNotHeld if the lock is over; ErrInvalid if it is nested, others are nested in it, or its Client
// may retain its lease (Options.Linger; LingerFor excludes keys). The lock then stays as it is; but if a lock
// is nested in it at this very moment, this one is released.
func (l *Lock) Detach() (Detached, error) {
	t := l.ticket()
	nested := invalid("Lock", "nested",
		"only a lock that is neither nested, nor has others nested in it, can be detached")
	switch {
	case l.around != nil, l.handles.Load() > 1:
		return Detached{}, nested
	case node.Retains(l.Owner()):
		return Detached{}, invalid("Lock", "one whose lease may be retained",
			"Linger, or LingerFor of its key, must be 0")
	}
	d := &detached{key: t.Key(), owner: t.Owner(), token: t.Fence(), ttl: t.TTL(), until: t.Until()}
	ended := false
	err := l.release(func(t *flight.Ticket) (err error) {
		ended = true
		d.top, err = t.Abandon()
		return err
	})
	switch {
	case err != nil:
		return Detached{}, err
	case !ended:
		return Detached{}, nested
	}
	return Detached{func() *detached { return d }}, nil
}

// Attach makes the detached lock one of this Client, with its key, its token, and its ttl in full from now
// on. The token is a new, larger one only if somebody else may have had a token of the key meanwhile. Of any
// number of calls with the same Detached, one at most succeeds. (If several are made at the same moment,
// perhaps none does; then the key is free.)
//
// Errors: ErrNotHeld if it was attached before, or has expired; ErrClosed; ErrInvalid for the zero Detached,
// or a ttl above Options.MaxTTL. After ErrUnavailable, or ctx's error, the outcome is not known, and the key
// is kept for its ttl: call Attach again, on the same Client. Attach makes one attempt, which takes at most
// NodeTimeout from when it was written to the nodes, and up to 1.5s more if a connection has to be dialled.
//
// Other callers of this process that want the key wait until the lock is released, as if another process had
// it.
func (c *Client) Attach(ctx context.Context, d Detached) (_ *Lock, err error) {
	switch {
	case c.flights == nil:
		return nil, errZeroClient
	case d.of == nil:
		return nil, errNoDetached
	}
	was := d.of()
	key, ttl := was.key, was.ttl
	if err := errors.Join(c.checkKey(key), c.checkTTL(ttl)); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, &QuorumError{Op: "attach", Key: key, Need: c.quorum.Need(), ctx: err}
	}
	if _, busy := c.attaching.LoadOrStore(key, nil); busy {
		return nil, &QuorumError{Op: "attach", Key: key, Need: c.quorum.Need(), sentinel: ErrUnavailable,
			reason: errAttaching}
	}
	defer c.attaching.Delete(key)
	l := c.newLock()
	w := c.watching.wait(ctx, key, &l.own, false)
	defer func() { w.waited(&l.own, false, err) }()
	lease := new(quorum.Lease)
	c.quorum.Prepare(lease, c.opts.KeyPrefix+key, ttl, 1, "")
	lease.Attach(&node.Replaced{Owners: c.unsettled.owners(was), Token: was.token, Top: was.top})
	l.own.Bring(lease)
	// not by leaving the queue: what is won just then would be released
	stop := context.AfterFunc(ctx, lease.Cancel)
	stays := context.WithoutCancel(ctx)
	err = c.attaches.End(stays, c.attaches.Begin(stays, key, &l.own, ttl, NoRetry(), true))
	stop()
	if err == nil {
		c.unsettled.settle(was)
		return l, nil
	}
	var q *QuorumError
	switch {
	case !errors.As(err, &q):
	case errors.Is(err, ErrNotAcquired): // a Lock of this Client has it
		q.sentinel = ErrNotHeld
	case errors.Is(err, ErrNotHeld):
		c.unsettled.settle(was)
	default:
		q.ctx = ctx.Err()
		c.unsettled.add(was, lease.Owner()) // even if nothing was sent yet: a writer may have it in hand
	}
	return nil, err
}

var errAttaching = errors.New("another Attach of this Client is at it")

var errNoDetached = fmt.Errorf("flightlock: %w: the Detached is of no lock", ErrInvalid)

// unsettled are the owners of attempts to attach whose outcome is not known: nodes may have the key of the
// detached lock in their names, and the next attempt accepts these. They are remembered until the last
// attempt's ttl has passed, and the key with it. So there is one attempt at a key at a time: another one
// would not know the owner of the first, and take a key that this leaves for one that is gone.
type unsettled struct {
	mu  sync.Mutex           // guards what follows
	all map[string]*attempts // by the detached owner
}

type attempts struct {
	owners []string
	until  time.Time
}

// maxUnsettled limits the owners of one lock. A node that has the key in the name of an older one refuses it.
const maxUnsettled = 64

// owners are those that an attempt to attach d accepts.
func (u *unsettled) owners(d *detached) []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	owners := []string{d.owner}
	if a := u.all[d.owner]; a != nil {
		owners = append(owners, a.owners...)
	}
	return owners
}

// add adds the owner of an attempt, and forgets those whose time has passed.
func (u *unsettled) add(d *detached, owner string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := clock.Now()
	for of, a := range u.all {
		if clock.Passed(now, a.until) {
			delete(u.all, of)
		}
	}
	if u.all == nil {
		u.all = map[string]*attempts{}
	}
	a := u.all[d.owner]
	if a == nil {
		a = &attempts{}
		u.all[d.owner] = a
	}
	a.owners = append(a.owners[max(0, len(a.owners)-maxUnsettled+1):], owner)
	a.until = now.Add(2 * d.ttl)
}

func (u *unsettled) settle(d *detached) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.all, d.owner)
}

// Key returns the key of the lock, "" for the zero Detached.
func (d Detached) Key() string {
	if d.of == nil {
		return ""
	}
	return d.of().key
}

// String names the key and the deadline, and not what is needed to attach the lock.
func (d Detached) String() string {
	if d.of == nil {
		return "no detached lock"
	}
	return fmt.Sprintf("detached lock %q until %s", d.of().key, d.of().until.Format(time.RFC3339Nano))
}

// GoString is String.
func (d Detached) GoString() string { return d.String() }

// LogValue is String.
func (d Detached) LogValue() slog.Value { return slog.StringValue(d.String()) }

// textVersion begins the text of a Detached.
const textVersion = "fl1."

// maxText is how long a part of it may be: more than any key and owner.
const maxText = 1 << 16

// MarshalText returns a text of printable ASCII without spaces, which contains the secret. The zero Detached
// is an ErrInvalid.
func (d Detached) MarshalText() ([]byte, error) {
	if d.of == nil {
		return nil, errNoDetached
	}
	was := d.of()
	text := fmt.Sprintf("%d %d %d %d %d %d %s%s", was.token, was.top, was.ttl.Milliseconds(),
		was.until.UnixMilli(), len(was.owner), len(was.key), was.owner, was.key)
	return []byte(textVersion + base64.RawURLEncoding.EncodeToString([]byte(text))), nil
}

// UnmarshalText reads what MarshalText has returned. Anything else is an ErrInvalid that does not contain the
// text.
func (d *Detached) UnmarshalText(text []byte) error {
	coded, ours := strings.CutPrefix(string(text), textVersion)
	plain, err := base64.RawURLEncoding.DecodeString(coded)
	rest := string(plain)
	var numbers [6]int64
	for i := range numbers {
		var field string
		field, rest, _ = strings.Cut(rest, " ")
		n, bad := strconv.ParseInt(field, 10, 64)
		numbers[i], err = n, cmp.Or(err, bad)
	}
	token, top, ttl, owner, key := numbers[0], numbers[1], clock.Mul(numbers[2], time.Millisecond), numbers[4],
		numbers[5]
	if !ours || err != nil || token <= 0 || top < 0 || ttl <= 0 || min(owner, key) <= 0 ||
		max(owner, key) > maxText || owner+key != int64(len(rest)) {
		return fmt.Errorf("flightlock: %w: the text of %d bytes is not that of a Detached", ErrInvalid, len(text))
	}
	was := &detached{rest[owner:], rest[:owner], token, top, ttl, time.UnixMilli(numbers[3])}
	d.of = func() *detached { return was }
	return nil
}
