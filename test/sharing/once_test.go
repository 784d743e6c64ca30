package sharing

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/flightlock/flightlock/once"
)

// onceEnv tells TestMain that it runs in a process of TestTicksThroughKills: the file of notes, the first
// tick in Unix milliseconds, how many there are, how far the clock is off in milliseconds, and the addresses
// of the records' server and of the nodes.
const onceEnv = "FLIGHTLOCK_ONCE"

// ticksApart is the time from a tick to the next. Each fifth one kills the first process that runs its job,
// halfway.
const ticksApart, killsEach = 50 * time.Millisecond, 5

var ticksFlag = flag.Int("ticks", 0,
	"how many ticks TestTicksThroughKills has; 0: as many as there is time for")

// onceMain calls for all ticks in both ways, and for each until nobody has to call for it again. It begins
// where an earlier process with that clock was killed.
func onceMain(spec string) int {
	parts := strings.Split(spec, ",")
	number := func(i int) int64 { n, _ := strconv.ParseInt(parts[i], 10, 64); return n }
	f, err := os.OpenFile(parts[0], os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return 1
	}
	nodes := nodesAt(parts[4:])
	// The ttl is short: it is how long it takes to replace a process that was killed.
	opts := flightlock.Options{MaxTTL: 300 * time.Millisecond, NodeTimeout: 100 * time.Millisecond}
	c, err := flightlock.New(opts, nodes[1:]...)
	if err != nil {
		return 1
	}
	go exitWithParent()
	off := time.Duration(number(3)) * time.Millisecond
	over := fmt.Sprint("clock ", off, " over ")
	text, err := os.ReadFile(parts[0])
	if err != nil {
		return 1
	}
	for i := strings.Count(string(text), over); i < int(number(2)); i++ {
		tick := time.UnixMilli(number(1)).Add(time.Duration(i) * ticksApart)
		time.Sleep(time.Until(tick.Add(off)))
		for _, way := range []string{"last", "first"} {
			fn := func(context.Context, *flightlock.Lock) error {
				fmt.Fprintln(f, way, i, "begins") // at once: it is there if the process is killed
				time.Sleep(time.Duration(rand.IntN(5)) * time.Millisecond)
				if i%killsEach == 0 && firstTime(fmt.Sprint(parts[0], ".", way, i)) {
					self, _ := os.FindProcess(os.Getpid())
					_ = self.Kill()
					select {}
				}
				fmt.Fprintln(f, way, i, "done")
				return nil
			}
			run := once.RecordLast
			if way == "first" {
				run = once.RecordFirst
			}
			for {
				ran, err := run(context.Background(), c, nodes[0], way, tick, time.Hour, fn)
				if !ran && err == nil {
					break
				}
			}
		}
		fmt.Fprintln(f, over, i)
	}
	return 0
}

// firstTime reports whether this is the first call with that name in all processes.
func firstTime(name string) bool {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL, 0o600)
	return err == nil && f.Close() == nil
}

// Three processes, with clocks up to a second apart, run the jobs of ticks, and are killed: by each fifth
// tick halfway, and at random. RecordLast misses no tick, and RecordFirst repeats none. With -ticks 1000
// there are a thousand.
func TestTicksThroughKills(t *testing.T) {
	t.Parallel()
	const processes = 3
	ticks := cmp.Or(*ticksFlag, testkit.Full(330, 20))
	servers, _ := lockkit.StartNodes(t, 2)
	notes := filepath.Join(t.TempDir(), "notes")
	from := time.Now().Add(time.Second).UnixMilli()
	run := func(place int) (err error) {
		cmd, err := procs.Self(fmt.Sprintf("%s=%s,%d,%d,%d,%s,%s", onceEnv, notes, from, ticks, (place-1)*500,
			servers[0].Addr(), servers[1].Addr()))
		if err != nil {
			t.Error(err)
			return nil
		}
		child, err := procs.StartChild(cmd)
		if err != nil {
			t.Error(err)
			return nil
		}
		killed := time.AfterFunc(time.Duration(500+rand.IntN(3000))*time.Millisecond, child.Kill)
		defer killed.Stop()
		return child.Wait()
	}
	var all sync.WaitGroup
	for place := range processes {
		all.Go(func() {
			for run(place) != nil { // it was killed
			}
		})
	}
	all.Wait()

	text, err := os.ReadFile(notes)
	testkit.Must(t, err)
	count := map[string]int{}
	for line := range strings.Lines(string(text)) {
		count[strings.TrimSpace(line)]++
	}
	repeated, lost := 0, 0
	for i := range ticks {
		if count[fmt.Sprintf("last %d done", i)] == 0 {
			t.Errorf("RecordLast has missed tick %d", i)
		}
		if n := count[fmt.Sprintf("first %d begins", i)]; n > 1 {
			t.Errorf("RecordFirst has run tick %d %d times", i, n)
		}
		if count[fmt.Sprintf("last %d begins", i)] > 1 {
			repeated++
		}
		if count[fmt.Sprintf("first %d done", i)] == 0 {
			lost++
		}
	}
	t.Logf("of %d ticks RecordLast has repeated %d, and RecordFirst lost %d", ticks, repeated, lost)
	if repeated < ticks/killsEach || lost < ticks/killsEach || lost > ticks/2 {
		t.Error("processes were not killed halfway, or most ticks of RecordFirst were lost")
	}
}
