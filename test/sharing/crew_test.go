package sharing

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// crewEnv tells TestMain that it runs in a process of a crew: an order, as JSON.
const crewEnv = "FLIGHTLOCK_CREW"

// An order is what a process of a crew is told.
type order struct {
	Work    string        // one of works
	Permits int           // of the semaphore
	Turns   int           // how many it has; 0: until the process is killed
	MaxTTL  time.Duration // of its Client
	Notes   string        // the file in which it notes what it has
	Nodes   []string      // addresses
}

// works are what 4 goroutines of a process do, again and again: each turn has a number, which its notes begin
// with.
var works = map[string]func(c *flightlock.Client, n notes, o order) (turn func(ctx context.Context, id int)){
	"readers": readers,
	"permits": permits,
	"sets":    sets,
}

// notes is the file of a process of a crew.
type notes struct{ f *os.File }

// note writes a line at once, so that it is there if the process is killed: which lock, of what kind and
// token, was valid at that moment. The moment is read first.
func (n notes) note(l *flightlock.Lock, id int, kind string) bool {
	now := time.Now().UnixNano()
	if l.Err() != nil {
		return false
	}
	_, err := fmt.Fprintf(n.f, "%d %s %d %d\n", id, kind, l.Fence(), now)
	return err == nil
}

// crewMain works until it has had its turns, is killed, or its stdin ends.
func crewMain(text string) int {
	var o order
	if json.Unmarshal([]byte(text), &o) != nil {
		return 1
	}
	f, err := os.Create(o.Notes)
	if err != nil {
		return 1
	}
	c, err := flightlock.New(flightlock.Options{MaxTTL: o.MaxTTL}, nodesAt(o.Nodes)...)
	if err != nil {
		return 1
	}
	go exitWithParent()
	turn := works[o.Work](c, notes{f}, o)
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for id := i; o.Turns == 0 || id < o.Turns; id += 4 {
				turn(context.Background(), id)
			}
		})
	}
	all.Wait()
	if c.Close(context.Background()) != nil {
		return 1
	}
	return 0
}

// exitWithParent ends the process when its stdin ends: then its parent has.
func exitWithParent() {
	_, _ = bufio.NewReader(os.Stdin).ReadString(0)
	os.Exit(1)
}

func nodesAt(addrs []string) (nodes []redis.UniversalClient) {
	for _, addr := range addrs {
		nodes = append(nodes, redis.NewClient(&redis.Options{Addr: addr, DialerRetries: 1}))
	}
	return nodes
}

// A crew is processes that do the same work on the same nodes.
type crew struct {
	order
	t       *testing.T
	servers []*redistest.Server
	dir     string
	files   []string
	running []*procs.Child
}

func startCrew(t *testing.T, processes, nodes int, o order) *crew {
	t.Helper()
	c := &crew{order: o, t: t, dir: t.TempDir()}
	c.servers, _ = lockkit.StartNodes(t, nodes)
	for _, s := range c.servers {
		c.Nodes = append(c.Nodes, s.Addr())
	}
	for range processes {
		c.running = append(c.running, c.start())
	}
	return c
}

func (c *crew) start() *procs.Child {
	c.t.Helper()
	o := c.order
	o.Notes = filepath.Join(c.dir, fmt.Sprint(len(c.files)))
	c.files = append(c.files, o.Notes)
	text, err := json.Marshal(o)
	testkit.Must(c.t, err)
	cmd, err := procs.Self(crewEnv + "=" + string(text))
	testkit.Must(c.t, err)
	child, err := procs.StartChild(cmd)
	testkit.Must(c.t, err)
	c.t.Cleanup(child.Kill)
	return child
}

// suffer kills and stops processes, and stops nodes and restarts them empty, for so long. Then it kills all
// processes.
func (c *crew) suffer(length time.Duration) {
	c.t.Helper()
	restarted := time.Now()
	for end := time.Now().Add(length); time.Now().Before(end); {
		time.Sleep(time.Duration(50+rand.IntN(150)) * time.Millisecond)
		p, s := rand.IntN(len(c.running)), c.servers[rand.IntN(len(c.servers))]
		switch rand.IntN(4) {
		case 0:
			c.running[p].Kill()
			c.running[p] = c.start()
		case 1:
			_ = c.running[p].Stop()
			time.Sleep(time.Duration(rand.IntN(700)) * time.Millisecond) // longer than some ttls
			_ = c.running[p].Cont()
		case 2:
			testkit.Must(c.t, s.Stop())
			time.Sleep(time.Duration(rand.IntN(200)) * time.Millisecond)
			testkit.Must(c.t, s.Cont())
		case 3:
			if time.Since(restarted) > c.MaxTTL*3/2 { // the last one has votes again
				testkit.Must(c.t, s.Kill())
				if len(c.servers) < 3 { // nobody else remembers what it had
					time.Sleep(c.MaxTTL)
				}
				testkit.Must(c.t, s.Restart())
				restarted = time.Now()
			}
		}
	}
	for _, child := range c.running {
		child.Kill()
	}
}

// span is a time for which a lock was valid.
type span struct {
	kind       string
	fence      int64
	begin, end int64
}

// spans reads what the processes have noted, in the order in which they begin.
func (c *crew) spans() (all []span) {
	c.t.Helper()
	for _, file := range c.files {
		text, err := os.ReadFile(file)
		if os.IsNotExist(err) { // it was killed before it began
			continue
		}
		testkit.Must(c.t, err)
		type lock struct {
			id   int
			kind string
		}
		at := map[lock]int{}
		for line := range strings.Lines(string(text)) {
			var l lock
			var s span
			if _, err := fmt.Sscanf(line, "%d %s %d %d\n", &l.id, &s.kind, &s.fence, &s.begin); err != nil {
				continue // the last line of one that was killed
			}
			l.kind = s.kind
			i, known := at[l]
			if !known {
				i = len(all)
				at[l], all = i, append(all, s)
			}
			all[i].end = s.begin
		}
	}
	slices.SortFunc(all, func(a, b span) int { return cmp.Compare(a.begin, b.begin) })
	return all
}

// atOnce is how many locks were valid at the same moment, at most.
func atOnce(all []span) (most int) {
	var ends []int64 // of those that are valid
	for _, s := range all {
		ends = slices.DeleteFunc(ends, func(end int64) bool { return end <= s.begin })
		ends = append(ends, s.end)
		most = max(most, len(ends))
	}
	return most
}
