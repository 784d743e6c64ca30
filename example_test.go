package flightlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/redis/go-redis/v9"
)

// exampleNodes starts n nodes in memory in place of real servers.
func exampleNodes(n int) (nodes []redis.UniversalClient, stop func()) {
	servers := flightlocktest.Start(n)
	for i := range n {
		nodes = append(nodes, servers.Redis(i))
	}
	return nodes, servers.Close
}

// exampleClient is a client over one such node.
func exampleClient() (c *flightlock.Client, stop func()) {
	nodes := flightlocktest.Start(1)
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	return c, nodes.Close
}

func Example() {
	nodes, stop := exampleNodes(3) // redis.NewClient for each of your servers
	defer stop()
	c, err := flightlock.New(flightlock.Options{}, nodes...)
	if err != nil {
		panic(err)
	}
	defer c.Close(context.Background())

	ctx := context.Background()
	lock, err := c.SingleFlightLock(ctx, "order:42", 10*time.Second, nil)
	if err != nil {
		panic(err)
	}
	defer lock.Release(ctx)
	fmt.Println("locked", lock.Key(), "with a token:", lock.Fence() > 0)
	// Output: locked order:42 with a token: true
}

func ExampleClient_RLock() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()

	first, err := c.RLock(ctx, "prices", 10*time.Second, nil)
	if err != nil {
		panic(err)
	}
	second, err := c.RLock(ctx, "prices", 10*time.Second, nil) // shares the lease of the first
	if err != nil {
		panic(err)
	}
	_, err = c.TryLock(ctx, "prices", 10*time.Second)
	fmt.Println("a writer beside readers:", errors.Is(err, flightlock.ErrNotAcquired))
	first.Release(ctx)
	second.Release(ctx)
	writer, err := c.TryLock(ctx, "prices", 10*time.Second)
	fmt.Println("after them:", err, writer.Fence() > second.Fence())
	// Output:
	// a writer beside readers: true
	// after them: <nil> true
}

func ExampleNew() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"})
	defer rdb.Close() // after the Client: New never closes what it was given
	c, err := flightlock.New(flightlock.Options{
		NodeTimeout: 100 * time.Millisecond, // a node in another zone
		MaxTTL:      5 * time.Minute,
	}, rdb)
	if err != nil {
		panic(err)
	}
	fmt.Println(c.Close(context.Background()))
	// Output: <nil>
}

func ExampleOpen() {
	_, err := flightlock.Open(flightlock.Options{}, "redis://app:secret@127.0.0.1:6379/0?nonsense=1")
	fmt.Println(errors.Is(err, flightlock.ErrInvalid))
	fmt.Println(err)
	// Output:
	// true
	// flightlock: invalid: urls[0] is "redis://app:xxxxx@127.0.0.1:6379/0?nonsense=xxxxx": redis: unexpected option: nonsense
}

// Many callers take turns on one key, and only the first one acquires it from Redis.
func ExampleClient_SingleFlightLock() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	total := 0 // guarded by the lock
	done := make(chan error)
	for range 100 {
		go func() {
			lock, err := c.SingleFlightLock(ctx, "total", time.Second, nil)
			if err == nil {
				total++
				err = lock.Release(ctx)
			}
			done <- err
		}()
	}
	for range 100 {
		if err := <-done; err != nil {
			panic(err)
		}
	}
	fmt.Println(total, c.Stats().Acquired)
	// Output: 100 100
}

// A job that is already running must not run twice.
func ExampleClient_TryLock() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	first, _ := c.TryLock(ctx, "nightly-report", time.Minute)
	defer first.Release(ctx)

	_, err := c.TryLock(ctx, "nightly-report", time.Minute)
	fmt.Println(errors.Is(err, flightlock.ErrNotAcquired))
	// Output: true
}

// Work that must stop when the lock is lost uses the lock's Context.
func ExampleLock_Context() {
	c, stop := exampleClient()
	defer stop()
	lock, err := c.SingleFlightLock(context.Background(), "job", 50*time.Millisecond, nil)
	if err != nil {
		panic(err)
	}
	ctx := lock.Context(context.Background())
	<-ctx.Done() // the lock is not refreshed
	fmt.Println(errors.Is(context.Cause(ctx), flightlock.ErrLockLost))
	fmt.Println(errors.Is(lock.Release(context.Background()), flightlock.ErrNotHeld))
	// Output:
	// true
	// true
}

// On a hot path: the release is on its way, and nobody waits for it. The next lock is asked for behind it.
func ExampleLock_ReleaseAsync() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	for range 3 {
		lock, err := c.TryLock(ctx, "session:7", 10*time.Second)
		if err != nil {
			panic(err)
		}
		// the work
		lock.ReleaseAsync()
		fmt.Println(errors.Is(lock.Err(), flightlock.ErrNotHeld))
	}
	// Output:
	// true
	// true
	// true
}

// A job of unknown length keeps its lock with AutoRefresh.
func ExampleLock_AutoRefresh() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	lock, err := c.SingleFlightLock(ctx, "job", 30*time.Second, nil)
	if err != nil {
		panic(err)
	}
	if err := lock.AutoRefresh(context.Background(),
		flightlock.RefreshPolicy{MaxHold: time.Minute}); err != nil {
		panic(err)
	}
	work := lock.Context(ctx)
	select {
	case <-time.After(10 * time.Millisecond): // the job, however long it takes
	case <-work.Done():
	}
	fmt.Println(work.Err(), lock.Release(ctx))
	// Output: <nil> <nil>
}

// Before a long step of a job: is there enough time left, or must the lock be refreshed?
func ExampleLock_Refresh() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	lock, err := c.SingleFlightLock(ctx, "job", time.Second, nil)
	if err != nil {
		panic(err)
	}
	before := lock.Until()
	if err := lock.Refresh(ctx); err != nil {
		panic(err)
	}
	fmt.Println(lock.Until().After(before))
	lock.Release(ctx)
	fmt.Println(errors.Is(lock.Refresh(ctx), flightlock.ErrNotHeld))
	// Output:
	// true
	// true
}

// A resource that remembers the largest token refuses a holder that does not know yet that it has
// lost the lock.
func ExampleLock_Fence() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	var highest int64
	write := func(token int64) bool {
		if token < highest {
			return false
		}
		highest = token
		return true
	}
	old, _ := c.SingleFlightLock(ctx, "file", time.Second, nil)
	old.Release(ctx) // or it expired while its holder was paused
	current, _ := c.SingleFlightLock(ctx, "file", time.Second, nil)
	defer current.Release(ctx)
	fmt.Println(write(current.Fence()), write(old.Fence()))
	// Output: true false
}

// Check reports whether servers are fit for locking. One of these two does not exist.
func ExampleClient_Check() {
	nodes, stop := exampleNodes(1)
	defer stop()
	gone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1})
	defer gone.Close()
	c, err := flightlock.New(flightlock.Options{NodeTimeout: time.Second}, append(nodes, gone)...)
	if err != nil {
		panic(err)
	}
	defer c.Close(context.Background())

	report, err := c.Check(context.Background())
	if err != nil {
		panic(err)
	}
	for _, f := range report.Findings {
		if f.Status == flightlock.StatusFail {
			fmt.Println("fails:", strings.TrimSpace(f.Check+" "+f.Node))
		}
	}
	fmt.Println(report.Status) // fmt.Print(report) shows all findings, with fixes
	// Output:
	// fails: reachable 127.0.0.1:1
	// fails: locks
	// fail
}

// A finding that is not ok says why it matters, and how to fix it.
func ExampleFinding() {
	f := flightlock.Finding{
		Node: "10.0.0.1:6379", Check: "eviction", Status: flightlock.StatusFail,
		Found: "maxmemory-policy is allkeys-lru",
		Why:   "a lock that is evicted has two holders",
		Fix:   "redis-cli -h 10.0.0.1 CONFIG SET maxmemory-policy noeviction",
	}
	fmt.Print(flightlock.Report{Status: f.Status, Findings: []flightlock.Finding{f}})
	// Output:
	// fail     10.0.0.1:6379  eviction  maxmemory-policy is allkeys-lru
	//          why: a lock that is evicted has two holders
	//          fix: redis-cli -h 10.0.0.1 CONFIG SET maxmemory-policy noeviction
	// 1 fail, 0 warn, 0 unknown, 0 ok
}

// Decide by the report whether to start the service.
func ExampleReport() {
	c, stop := exampleClient()
	defer stop()
	report, err := c.Check(context.Background())
	if err != nil {
		panic(err)
	}
	switch report.Status {
	case flightlock.StatusOK, flightlock.StatusUnknown: // not readable for this user
		fmt.Println("go")
	case flightlock.StatusWarn:
		fmt.Println("go, and fix it in office hours")
	case flightlock.StatusFail:
		fmt.Println("stop")
	}
	// Output: go
}

// Err reports whether the work is still covered. It reads the clock, so it is right at once, also
// after a pause of the process.
func ExampleLock_Err() {
	c, stop := exampleClient()
	defer stop()
	lock, err := c.SingleFlightLock(context.Background(), "job", 50*time.Millisecond, nil)
	if err != nil {
		panic(err)
	}
	fmt.Println(lock.Err())
	time.Sleep(time.Until(lock.Until())) // the work took too long
	fmt.Println(errors.Is(lock.Err(), flightlock.ErrLockLost))
	// Output:
	// <nil>
	// true
}

// A process dials its nodes before it takes traffic, so its first callers do not wait for that.
func ExampleClient_Ready() {
	nodes, stop := exampleNodes(1)
	defer stop()
	c, err := flightlock.New(flightlock.Options{}, nodes...)
	if err != nil {
		panic(err)
	}
	defer c.Close(context.Background())

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := c.Ready(ctx); err != nil {
		fmt.Println("not ready:", err) // names the nodes, and the error of each
		return
	}
	fmt.Println("ready")
	// Output: ready
}

// How many locks a service uses, and how many of them come from Redis.
func ExampleClient_Stats() {
	c, stop := exampleClient()
	defer stop()
	ctx := context.Background()
	for range 3 {
		lock, err := c.SingleFlightLock(ctx, "job", time.Second, nil)
		if err != nil {
			panic(err)
		}
		lock.Release(ctx)
	}
	s := c.Stats()
	fmt.Println("locks:", s.Acquired, "asked Redis:", s.Attempts, "held:", s.Held)
	// Output: locks: 3 asked Redis: 3 held: 0
}

// With NoPrefix the key in Redis has no prefix, so that other Redlock clients use the same key.
func ExampleOptions() {
	nodes, stop := exampleNodes(1)
	defer stop()
	c, err := flightlock.New(flightlock.Options{
		NoPrefix: true,
		Label:    "billing",
	}, nodes...)
	if err != nil {
		panic(err)
	}
	defer c.Close(context.Background())

	ctx := context.Background()
	lock, err := c.SingleFlightLock(ctx, "invoice:7", time.Second, nil)
	if err != nil {
		panic(err)
	}
	defer lock.Release(ctx)
	stored := nodes[0].Get(ctx, "invoice:7").Val()
	fmt.Println(stored == lock.Owner(), strings.HasPrefix(stored, "billing#"))
	// Output: true true
}

// With Linger the process keeps the lock's lease for the next caller, until another process wants the
// key: a lock that is used again costs no command.
func ExampleOptions_linger() {
	nodes, stop := exampleNodes(1)
	defer stop()
	c, err := flightlock.New(flightlock.Options{Linger: 10 * time.Second}, nodes...)
	if err != nil {
		panic(err)
	}
	defer c.Close(context.Background()) // releases what is retained

	ctx := context.Background()
	use := func() {
		lock, err := c.SingleFlightLock(ctx, "session:7", time.Minute, nil)
		if err != nil {
			panic(err)
		}
		lock.Release(ctx)
	}
	for c.Stats().Reused == 0 { // the nodes have to confirm the Client's inbox first
		use()
	}
	before := c.Stats()
	for range 3 {
		use()
	}
	after := c.Stats()
	fmt.Println("locks:", after.Acquired-before.Acquired, "asked Redis:", after.Attempts-before.Attempts)
	fmt.Println("held:", after.Held, "retained:", after.Retained)
	// Output:
	// locks: 3 asked Redis: 0
	// held: 0 retained: 1
}
