package sharing

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// readersEnv tells TestMain that it runs in a process of readers and writers: the file in which they note what they
// have, and the addresses of the nodes.
const readersEnv = "FLIGHTLOCK_READERS"

// notes is the file of a process of readers and writers.
type notes struct{ f *os.File }

// note writes a line at once, so that it is there if the process is killed: which lock, of what kind and token, was
// valid at that moment. The moment is read first.
func (n notes) note(l *flightlock.Lock, id int, kind string) bool {
	now := time.Now().UnixNano()
	if l.Err() != nil {
		return false
	}
	_, err := fmt.Fprintf(n.f, "%d %s %d %d\n", id, kind, l.Fence(), now)
	return err == nil
}

// readersMain has 4 goroutines read and write one key, until the process is killed or its stdin ends.
func readersMain(spec string) int {
	parts := strings.Split(spec, ",")
	f, err := os.Create(parts[0])
	if err != nil {
		return 1
	}
	n := notes{f}
	var nodes []redis.UniversalClient
	for _, addr := range parts[1:] {
		nodes = append(nodes, redis.NewClient(&redis.Options{Addr: addr, DialerRetries: 1}))
	}
	c, err := flightlock.New(flightlock.Options{MaxTTL: 2 * time.Second}, nodes...)
	if err != nil {
		return 1
	}
	ctx := context.Background()
	for i := range 4 {
		go func() {
			for id := i; ; id += 4 {
				kind, lock := "r", c.RLock
				if rand.IntN(8) == 0 {
					kind, lock = "w", c.SingleFlightLock
				}
				l, err := lock(ctx, "k", time.Duration(100+rand.IntN(400))*time.Millisecond, nil)
				if err != nil {
					continue
				}
				for range rand.IntN(10) {
					if !n.note(l, id, kind) {
						break
					}
					time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
				}
				n.note(l, id, kind)
				_ = l.Release(ctx)
			}
		}()
	}
	_, _ = bufio.NewReader(os.Stdin).ReadString(0)
	return 0
}

// span is a time for which a lock was valid.
type span struct {
	kind       string
	fence      int64
	begin, end int64
}

// spansOf reads what a process has noted.
func spansOf(t *testing.T, file string) (all []span) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	at := map[int]int{}
	for line := range strings.Lines(string(text)) {
		var id int
		var s span
		if _, err := fmt.Sscanf(line, "%d %s %d %d\n", &id, &s.kind, &s.fence, &s.begin); err != nil {
			continue // the last line of one that was killed
		}
		i, known := at[id]
		if !known {
			i = len(all)
			at[id], all = i, append(all, s)
		}
		all[i].end = s.begin
	}
	return all
}

// Eight processes read and write a key on three nodes. Processes are killed and stopped, and nodes are stopped and
// restarted empty. No writer is valid beside anybody, and tokens rise from writer to writer with those of the readers
// between them.
func TestReadersAndWritersThatAreKilled(t *testing.T) {
	t.Parallel()
	const processes = 8
	length := 4 * time.Second
	if os.Getenv("FLIGHTLOCK_LONG") != "" {
		length = time.Minute
	}
	servers, _ := lockkit.StartNodes(t, 3)
	dir := t.TempDir()
	var files []string
	start := func() *procs.Child {
		spec := []string{filepath.Join(dir, fmt.Sprint(len(files)))}
		files = append(files, spec[0])
		for _, s := range servers {
			spec = append(spec, s.Addr())
		}
		cmd, err := procs.Self(readersEnv + "=" + strings.Join(spec, ","))
		if err != nil {
			t.Fatal(err)
		}
		child, err := procs.StartChild(cmd)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(child.Kill)
		return child
	}
	var running []*procs.Child
	for range processes {
		running = append(running, start())
	}
	restarted := time.Now()
	for end := time.Now().Add(length); time.Now().Before(end); {
		time.Sleep(time.Duration(50+rand.IntN(150)) * time.Millisecond)
		p, s := rand.IntN(processes), servers[rand.IntN(3)]
		switch rand.IntN(4) {
		case 0:
			running[p].Kill()
			running[p] = start()
		case 1:
			_ = running[p].Stop()
			time.Sleep(time.Duration(rand.IntN(700)) * time.Millisecond) // longer than some ttls
			_ = running[p].Cont()
		case 2:
			testkit.Must(t, s.Stop())
			time.Sleep(time.Duration(rand.IntN(200)) * time.Millisecond)
			testkit.Must(t, s.Cont())
		case 3:
			if time.Since(restarted) > 3*time.Second { // than MaxTTL: the last one has votes again
				testkit.Must(t, s.Kill())
				testkit.Must(t, s.Restart())
				restarted = time.Now()
			}
		}
	}
	for _, child := range running {
		child.Kill()
	}
	var all []span
	for _, file := range files {
		if _, err := os.Stat(file); err == nil { // else it was killed before it began
			all = append(all, spansOf(t, file)...)
		}
	}
	checkSpans(t, all)
}

// checkSpans looks for a writer beside anybody, and for tokens that fall.
func checkSpans(t *testing.T, all []span) {
	t.Helper()
	slices.SortFunc(all, func(a, b span) int { return cmp.Compare(a.begin, b.begin) })
	kinds := map[string]int{}
	var last, writer span // which ends last of all, and of the writers; and the largest tokens
	var largest, written int64
	together := 0
	for _, s := range all {
		kinds[s.kind]++
		before := last
		if s.kind == "r" {
			before = writer
			if s.begin < last.end {
				together++
			}
		}
		if s.begin < before.end {
			t.Errorf("%+v has the key beside %+v", s, before)
		}
		if s.kind == "w" && s.fence <= largest || s.kind == "r" && s.fence <= written {
			t.Errorf("%+v: the largest token before is %d, and %d of writers", s, largest, written)
		}
		largest = max(largest, s.fence)
		if s.end > last.end {
			last = s
		}
		if s.kind == "w" {
			written = max(written, s.fence)
			if s.end > writer.end {
				writer = s
			}
		}
	}
	t.Logf("%d reads, of which %d beside others, and %d writes", kinds["r"], together, kinds["w"])
	if together == 0 || kinds["w"] == 0 {
		t.Error("nobody has read beside others, or nobody has written")
	}
}
