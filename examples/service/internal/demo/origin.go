package demo

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"time"
)

// origin is where the service's values come from: slow, sometimes broken, and the one who counts. It is the
// only place where loads are counted, so that no variant of the service is asked how well it does.
//
// A load is a miss's first if, when it begins, no other load of its key is under way, and the cache has no
// fresh value by any load: none has ended well within the freshness period, or the cache was flushed since
// the lookup of the one that has. All other loads are surplus. Loads per miss is all loads over first loads:
// 1 if each miss is loaded once.
type origin struct {
	url   string
	token string
	fresh time.Duration // how long the service keeps a value as fresh
	srv   *http.Server

	mu      sync.Mutex // guards what follows
	latency time.Duration
	failing bool
	flushed time.Time // when the cache lost everything
	keys    map[string]*originKey
	counts  loadCounts
	surplus []string // some surplus loads, for the curious
	serial  int
}

// originKey is what the origin knows of a key.
type originKey struct {
	loading int       // loads under way
	ended   time.Time // when the last load that brought a value ended
	began   time.Time // when that was
}

// loadCounts counts what the origin has seen since it began.
type loadCounts struct {
	Loads   int // that the origin worked on: those with wrong credentials are not among them
	First   int // of these, the first of a miss
	Failed  int // of these, answered with an error
	Left    int // of these, whose caller left before the answer
	Refused int // for wrong credentials
}

func (c loadCounts) minus(o loadCounts) loadCounts {
	return loadCounts{c.Loads - o.Loads, c.First - o.First, c.Failed - o.Failed,
		c.Left - o.Left, c.Refused - o.Refused}
}

// perMiss is loads per miss; 0 if there was none.
func (c loadCounts) perMiss() float64 {
	if c.First == 0 {
		return 0
	}
	return float64(c.Loads) / float64(c.First)
}

// onItsWay is how long a load may take, on a busy machine, from its lookup in the cache to the origin. The
// lookup of one that begins so soon after a flush may have been before it.
const onItsWay = 100 * time.Millisecond

// maxSurplus is how many surplus loads are kept for the log.
const maxSurplus = 20

func startOrigin(token string, latency, fresh time.Duration) (*origin, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("starting the origin: %w", err)
	}
	o := &origin{url: "http://" + l.Addr().String(), token: token, latency: latency, fresh: fresh,
		keys: map[string]*originKey{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /load/{key}", o.load)
	o.srv = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = o.srv.Serve(l) }() // ends with close
	return o, nil
}

func (o *origin) close() error { return o.srv.Close() }

func (o *origin) setLatency(d time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.latency = d
}

func (o *origin) setFailing(failing bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.failing = failing
}

// cacheFlushed says that from now on every value has to be loaded again.
func (o *origin) cacheFlushed() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.flushed = time.Now()
}

func (o *origin) snapshot() loadCounts {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.counts
}

// takeSurplus returns some of the surplus loads since the last call.
func (o *origin) takeSurplus() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.surplus
	o.surplus = nil
	return s
}

// load serves GET /load/{key}.
func (o *origin) load(w http.ResponseWriter, r *http.Request) {
	key := r.PathValue("key")
	if r.Header.Get("Authorization") != "Bearer "+o.token {
		o.mu.Lock()
		o.counts.Refused++
		o.mu.Unlock()
		http.Error(w, "wrong credentials", http.StatusUnauthorized)
		return
	}
	latency, failing := o.begin(key, time.Now())
	left := pause(r.Context(), latency)
	serial := o.end(key, !left && !failing, left, time.Now())
	if failing {
		http.Error(w, "the origin is down", http.StatusInternalServerError)
		return
	}
	fmt.Fprintf(w, "%s#%d", key, serial)
}

// begin counts a load that begins, and says how it will go.
func (o *origin) begin(key string, now time.Time) (latency time.Duration, failing bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	k := o.keys[key]
	if k == nil {
		k = &originKey{}
		o.keys[key] = k
	}
	o.counts.Loads++
	cached := k.ended.After(o.flushed) && now.Sub(k.ended) < o.fresh
	switch {
	case k.loading == 0 && !cached:
		o.counts.First++
	case len(o.surplus) < maxSurplus:
		o.surplus = append(o.surplus, fmt.Sprintf("%s: load while %d under way; "+
			"the one before began %v ago, and one ended well %v ago",
			key, k.loading, now.Sub(k.began), now.Sub(k.ended)))
	}
	k.loading++
	k.began = now
	return o.latency + rand.N(o.latency/4+1), o.failing
}

// end counts a load that is over, and numbers it.
func (o *origin) end(key string, well, left bool, now time.Time) (serial int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	k := o.keys[key]
	k.loading--
	switch {
	// the cache may have been flushed since: then it refuses it
	case well && k.began.Before(o.flushed.Add(onItsWay)):
	case well:
		k.ended = now
	case left:
		o.counts.Left++
	default:
		o.counts.Failed++
	}
	o.serial++
	return o.serial
}

// pause waits for d, and reports whether ctx ended first.
func pause(ctx context.Context, d time.Duration) (left bool) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return false
	case <-ctx.Done():
		return true
	}
}
