package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// This file turns the command line into a config: every flag, its limits and the help text.

const helpText = `bench shows and checks what flightlock does under load.

usage: go run ./bench [flags]

  (a) stampede   every caller of every client wants one cold cache key at once; an origin load takes 50 ms.
                 Unprotected, then with a singleflight per process, then with SingleFlightLock and a second
                 look at the cache under the lock, then with Fetch.
  (b) hot key    all goroutines of all clients lock and release one key, as fast as they can.
                 A table shows each process (or client, without -procs): its share of the locks and of the
                 time that the key was held, and the longest wait of any of its goroutines.
  (c) node dies  as (b), beside goroutines that lock a key of their own each; in the middle third one node
                 refuses connections, then it comes back.

With no flags: 3 embedded nodes (miniredis, in this process, on loopback TCP), 4 clients, about 15 seconds.

flags:
  -redis LIST      servers to lock on instead of the embedded nodes, each one independent node: host:port or
                   redis:// URLs, separated by commas, at most 15. Keys carry a random prefix and are removed
                   afterwards, the small fence counters apart. (c) puts a TCP proxy in front of the last one:
                   it needs 3 nodes and no TLS.
  -clients N       clients, each with connections of its own: 1 to 64, default 4 (or -procs, if that is more)
  -procs N         spread the clients over N processes: 0 to 64 and at most -clients, default 0 (all in
                   this one)
  -callers N       callers of each client in (a): 1 to 100000, default 1000
  -goroutines N    goroutines of each client in (b) and (c): 1 to 100000, default 250
  -duration D      length of (b) and of (c): 300ms to 10m, default 5s
  -work D          work under the lock of the hot key in (b) and (c): 0s to 1s, default 0s. Below 1ms it
                   keeps a CPU busy, from then on it sleeps.
  -polling N       N of the clients receive no notices and poll every 10 ms instead: 0 to 64 and at most
                   -clients, default 0
  -linger D        the clients keep the lease of a key that is released for up to D, so that their next caller
                   needs no command, until another client wants it (Options.Linger): 0s to 1m, default 0s
  -only LIST       the phases to run: some of a, b, c, separated by commas, default all
  -check           no benchmark: report whether the servers of -redis are fit for locking, and how to fix
                   what is not. Exit code 1 if a finding failed. It leaves nothing on the servers and needs
                   only the rights for locking.
  -prefix P        with -check, the KeyPrefix of your clients: default "lock:", '' for none
  -json FILE       write all figures as JSON to FILE; "-" for stdout, the table then goes to stderr
  -h               this text

The run fails (exit code 1) and says why if a key had two holders at once, if a fencing token did not rise
from one holder to the next, or if a miss was loaded more than once under the lock. A wrong flag is
exit code 2.
`

// Limits of the flags. They keep a run bounded in memory, connections and time.
const (
	maxNodes         = 15
	maxClients       = 64
	maxGoroutines    = 100_000
	maxAllGoroutines = 400_000
	minDuration      = 300 * time.Millisecond
	maxDuration      = 10 * time.Minute
	maxWork          = time.Second
	maxLinger        = time.Minute
)

// allPhases are the names of the phases that -only knows.
const allPhases = "abc"

// spinBelow is up to where -work keeps a CPU busy: a sleep that short would mostly measure the timer.
const spinBelow = time.Millisecond

// config is what the flags say, checked.
type config struct {
	redis      []string // URLs; empty means embedded nodes
	clients    int
	procs      int // 0: the clients run in this process
	callers    int // per client, in (a)
	goroutines int // per client, in (b) and (c)
	duration   time.Duration
	work       time.Duration // under the lock of the hot key
	polling    int           // of the clients: the last ones
	linger     time.Duration // Options.Linger of the clients
	only       string        // the phases to run, out of allPhases; empty means all
	jsonPath   string
	check      bool
	prefix     string // with check
	noPrefix   bool   // with check: its prefix is empty

	// No flags, but for tests to change: cold keys per way of (a), the time before (b) and (c) that
	// is not measured, and the library.
	misses   int
	warmup   time.Duration
	open     opener
	cacheURL string // "": processes share a key on the first node
}

// parseFlags reads args. Its errors name the flag, the value and the limit.
func parseFlags(args []string) (config, error) {
	cfg := config{callers: 1000, goroutines: 250, duration: 5 * time.Second,
		misses: 10, warmup: 500 * time.Millisecond, open: openClient}
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}
	fs.Func("redis", "", func(s string) (err error) { cfg.redis, err = parseNodes(s); return err })
	intFlag(fs, "clients", &cfg.clients, 1, maxClients)
	intFlag(fs, "procs", &cfg.procs, 0, maxClients)
	intFlag(fs, "callers", &cfg.callers, 1, maxGoroutines)
	intFlag(fs, "goroutines", &cfg.goroutines, 1, maxGoroutines)
	durationFlag(fs, "duration", &cfg.duration, minDuration, maxDuration)
	durationFlag(fs, "work", &cfg.work, 0, maxWork)
	intFlag(fs, "polling", &cfg.polling, 0, maxClients)
	durationFlag(fs, "linger", &cfg.linger, 0, maxLinger)
	fs.Func("only", "", func(s string) (err error) { cfg.only, err = parsePhases(s); return err })
	fs.BoolVar(&cfg.check, "check", false, "")
	fs.Func("prefix", "", func(s string) error {
		cfg.prefix, cfg.noPrefix = s, s == ""
		return nil
	})
	fs.Func("json", "", func(s string) error {
		if s == "" {
			return fmt.Errorf("want a file name, or - for stdout")
		}
		cfg.jsonPath = s
		return nil
	})
	if err := fs.Parse(args); err != nil {
		return config{}, err
	}
	if fs.NArg() > 0 {
		return config{}, fmt.Errorf("unexpected argument %q: there are only flags", fs.Arg(0))
	}
	return cfg.complete()
}

// complete fills in defaults that depend on other flags, and checks what only several flags
// together can break.
func (cfg config) complete() (config, error) {
	if cfg.check && len(cfg.redis) == 0 {
		return config{}, errors.New("-check: say which servers with -redis")
	}
	if (cfg.prefix != "" || cfg.noPrefix) && !cfg.check {
		return config{}, errors.New("-prefix: it goes with -check only; the bench makes a prefix of its own")
	}
	if cfg.clients == 0 {
		cfg.clients = max(4, cfg.procs)
	}
	if cfg.procs > cfg.clients {
		return config{}, fmt.Errorf("-procs %d: at most -clients (%d), for a process needs a client to run",
			cfg.procs, cfg.clients)
	}
	if cfg.polling > cfg.clients {
		return config{}, fmt.Errorf("-polling %d: at most -clients (%d)", cfg.polling, cfg.clients)
	}
	if n := cfg.clients * cfg.callers; n > maxAllGoroutines {
		return config{}, fmt.Errorf("-callers %d: x %d clients makes %d, at most %d", cfg.callers, cfg.clients, n,
			maxAllGoroutines)
	}
	if n := cfg.clients * cfg.goroutines; n > maxAllGoroutines {
		return config{}, fmt.Errorf("-goroutines %d: x %d clients makes %d, at most %d", cfg.goroutines,
			cfg.clients, n, maxAllGoroutines)
	}
	return cfg, nil
}

// runs reports whether a phase is to be run.
func (cfg config) runs(phase string) bool { return cfg.only == "" || strings.Contains(cfg.only, phase) }

// parsePhases reads the value of -only.
func parsePhases(list string) (phases string, err error) {
	for s := range strings.SplitSeq(list, ",") {
		if s = strings.TrimSpace(s); len(s) != 1 || !strings.Contains(allPhases, s) {
			return "", fmt.Errorf("want some of a, b, c, separated by commas")
		}
		phases += s
	}
	return phases, nil
}

func intFlag(fs *flag.FlagSet, name string, v *int, lo, hi int) {
	fs.Func(name, "", func(s string) error {
		n, err := strconv.Atoi(s)
		if err != nil || n < lo || n > hi {
			return fmt.Errorf("want a whole number from %d to %d", lo, hi)
		}
		*v = n
		return nil
	})
}

func durationFlag(fs *flag.FlagSet, name string, v *time.Duration, lo, hi time.Duration) {
	fs.Func(name, "", func(s string) error {
		d, err := time.ParseDuration(s)
		if err != nil || d < lo || d > hi {
			return fmt.Errorf("want a duration like 5s, from %v to %v", lo, hi)
		}
		*v = d
		return nil
	})
}

// parseNodes reads the value of -redis into URLs, each server once.
func parseNodes(list string) ([]string, error) {
	var urls []string
	seen := map[string]bool{}
	for s := range strings.SplitSeq(list, ",") {
		u, err := nodeURL(strings.TrimSpace(s))
		if err != nil {
			return nil, err
		}
		if seen[u.Host] {
			return nil, fmt.Errorf("%s is there twice: every node must be a server of its own", u.Host)
		}
		seen[u.Host] = true
		urls = append(urls, u.String())
	}
	if len(urls) > maxNodes {
		return nil, fmt.Errorf("%d servers, at most %d", len(urls), maxNodes)
	}
	return urls, nil
}

func nodeURL(s string) (*url.URL, error) {
	if !strings.Contains(s, "://") {
		s = "redis://" + s
	}
	u, err := url.Parse(s)
	if err != nil || (u.Scheme != "redis" && u.Scheme != "rediss") {
		return nil, fmt.Errorf("want host:port, or a redis:// or rediss:// URL")
	}
	if _, port, err := net.SplitHostPort(u.Host); err != nil || port == "" || u.Hostname() == "" {
		return nil, fmt.Errorf("%q: host or port is missing", u.Redacted())
	}
	return u, nil
}
