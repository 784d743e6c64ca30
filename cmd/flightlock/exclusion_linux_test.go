package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
)

// crew is a CMD of several processes, which runs until it is ended. All of them have an open file that is
// locked by flock(2), so the kernel says whether one is left: the lock ends with the last of them. One
// ignores TERM.
const crew = `exec 9>>"$0"
flock -n 9 || echo "$FLIGHTLOCK_FENCE began beside another" >>"$0.bad"
echo $$ >"$0.pid"
(trap "" TERM; exec sleep 600) &
sleep 600 &
wait`

// next is the CMD of the next holder.
const next = `exec 9>>"$0"; flock -n 9 || echo "$FLIGHTLOCK_FENCE began beside another" >>"$0.bad"`

// shortTTL leaves tests little to wait for. It is also MaxTTL, and so the time of a quarantine.
const shortTTL = "2s"

// A trio are three nodes, and what is between them and one of two machines.
type trio struct {
	t       *testing.T
	servers []*redistest.Server
	proxies []*redistest.Proxy
}

func newTrio(t *testing.T) *trio {
	tr := &trio{t: t}
	for range 3 {
		s := redistest.StartServer(t)
		redistest.Deploy(t, s.Client(t))
		tr.servers, tr.proxies = append(tr.servers, s), append(tr.proxies, redistest.StartProxy(t, s.Addr()))
	}
	return tr
}

// run starts script under the lock on key: on one machine, or on the one behind the proxies. file is its $0.
func (tr *trio) run(behind bool, key, script, file string) *running {
	var addrs []string
	for i, s := range tr.servers {
		addrs = append(addrs, map[bool]string{false: s.Addr(), true: tr.proxies[i].Addr()}[behind])
	}
	return start(tr.t, "run", "-redis", strings.Join(addrs, ","), "-key", key, "-ttl", shortTTL, "-max-ttl",
		shortTTL, "--", "sh", "-c", script, file)
}

// Whatever ends a hold, all processes of CMD are dead before the CMD of the next holder starts, and none
// lingers: when nodes are stopped, when the machine is cut off, when a node loses its data, and when CMD's
// first process is killed.
func TestCommandsOfOneKeyNeverOverlap(t *testing.T) {
	for name, strike := range map[string]func(tr *trio, round int){
		"nodes are stopped": func(tr *trio, round int) {
			stopped := tr.servers[:2+round%2]
			for _, s := range stopped {
				testkit.Must(tr.t, s.Stop())
			}
			time.Sleep(rand.N(2500 * time.Millisecond)) // some locks outlive that
			for _, s := range stopped {
				testkit.Must(tr.t, s.Cont())
			}
		},
		"partition": func(tr *trio, _ int) {
			for _, p := range tr.proxies {
				p.BlackHole(true)
			}
		},
		"one of three nodes is wiped": func(tr *trio, round int) {
			s := tr.servers[round%3]
			testkit.Must(tr.t, s.Kill())
			testkit.Must(tr.t, s.Restart())
		},
		"the first process is killed": func(*trio, int) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tr := newTrio(t)
			const together = 4 // under one fault
			tries, lost, spoilt := testkit.Full(24, together), 0, 0
			for round := 0; round*together-spoilt < tries; round++ {
				l, s := tr.round(t, round, together, strike, name == "partition")
				lost, spoilt = lost+l, spoilt+s
			}
			t.Logf("%d holds ended, at least %d of them because the lock was lost; the machine was too slow for %d "+
				"more",
				tries, lost, spoilt)
		})
	}
}

// round has holders under one fault, and kills the first processes of those that outlive it. It returns how
// many have lost their locks, if wait is true all, and how many show nothing, because processes of this
// machine did not run in time: a command said so, or lost its lock before CMD had begun, or the next one had.
func (tr *trio) round(t *testing.T, round, together int, strike func(*trio, int),
	wait bool) (lost, spoilt int) {
	t.Helper()
	dir := t.TempDir()
	type try struct {
		file         string
		pid          int
		holder, next *running
	}
	var all []try
	for i := range together {
		key := fmt.Sprintf("job-%d-%d", round, i)
		c := try{file: filepath.Join(dir, key)}
		c.holder = tr.run(true, key, crew, c.file)
		for c.pid == 0 && c.holder.Alive() {
			c.pid = idIn(c.file + ".pid")
			time.Sleep(time.Millisecond)
		}
		if c.pid == 0 {
			spoilt++
			t.Logf("too slow: %s", c.holder.wait(t).stderr)
			continue
		}
		c.next = tr.run(false, key, next, c.file)
		all = append(all, c)
	}
	time.Sleep(rand.N(700 * time.Millisecond)) // refreshes come every 0.67 s
	strike(tr, round)
	for _, c := range all {
		if !wait && c.holder.Alive() {
			_ = syscall.Kill(c.pid, syscall.SIGKILL)
		}
		res, after := c.holder.wait(t), c.next.wait(t)
		if res.code != exitLost && (wait || res.code != exitSignal+int(syscall.SIGKILL)) {
			t.Errorf("the holder: exit code %d", res.code)
		}
		if res.code == exitLost {
			lost++
			t.Logf("lost: %s", res.stderr)
		}
		if strings.Contains(res.stderr+after.stderr, outlived) || after.code == exitLost {
			spoilt++
			t.Logf("too slow: %s\n%s", res.stderr, after.stderr)
			continue
		}
		if after.code != exitOK {
			t.Errorf("the next holder: exit code %d", after.code)
		}
		if bad, err := os.ReadFile(c.file + ".bad"); err == nil {
			t.Errorf("%s", bad)
		}
		left, err := os.OpenFile(c.file, os.O_RDWR, 0)
		testkit.Must(t, err)
		if err := syscall.Flock(int(left.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			t.Errorf("a process lingers: %v", err)
		}
		_ = left.Close()
		if t.Failed() {
			t.Fatalf("the holder: %s\nthe next one: %s", res.stderr, after.stderr)
		}
	}
	for _, p := range tr.proxies {
		p.BlackHole(false)
	}
	return lost, spoilt
}

// A flightlock that was stopped beyond the ttl says that CMD has outlived the lock.
func TestAStoppedCommandSaysThatCMDHasOutlivedTheLock(t *testing.T) {
	tr := newTrio(t)
	file := filepath.Join(t.TempDir(), "job")
	holder := tr.run(false, "job", crew, file)
	pidIn(t, file+".pid")
	testkit.Must(t, holder.Stop())
	if res := tr.run(true, "job", "exit 0", file).wait(t); res.code != exitOK { // when the lock has ended
		t.Errorf("the next holder: exit code %d: %s", res.code, res.stderr)
	}
	testkit.Must(t, holder.Cont())
	if res := holder.wait(t); res.code != exitLost || !strings.Contains(res.stderr, outlived) {
		t.Errorf("exit code %d: %s", res.code, res.stderr)
	}
}
