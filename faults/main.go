//go:build linux

package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

type quiet struct{ *log.Logger }

func (quiet) Printf(context.Context, string, ...any) {}

func main() {
	redis.SetLogger(quiet{log.New(io.Discard, "", 0)}) // it reports every refused dial
	if os.Getenv(childEnv) != "" {
		os.Exit(childMain(os.Stdin, os.Stdout))
	}
	each := flag.Duration("each", 8*time.Second, "how long one scenario does its fault, at least once")
	total := flag.Duration("duration", 0, "go through all scenarios again and again until so much time has gone")
	only := flag.String("only", "", "scenarios whose name contains this")
	kind := flag.String("kind", "",
		"which kind of server the nodes look like: one of redistest.Kinds, such as dragonfly")
	ttl := flag.Duration("ttl", time.Second, "of the locks")
	linger := flag.Duration("linger", 400*time.Millisecond, "how long processes retain leases")
	paused := flag.Duration("paused", 0, "run the paused-holder test for so long, and not the scenarios")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	var err error
	if *paused > 0 {
		err = runPausedTest(ctx, *paused)
	} else {
		err = run(ctx, os.Stdout, *only, setup{TTL: *ttl, Linger: *linger, Kind: *kind}, *each, *total)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(1)
	}
}

// runPausedTest runs the paused-holder test and prints its table.
func runPausedTest(ctx context.Context, total time.Duration) error {
	r, err := runPaused(ctx, setup{TTL: 2 * time.Second}, 5*time.Second, total)
	if err == nil {
		r.print(os.Stdout)
	}
	return err
}

// run runs the scenarios and prints the table.
func run(ctx context.Context, out io.Writer, only string, set setup, each, total time.Duration) error {
	var verdicts []*verdict
	var violations []string
	for end := time.Now().Add(total); ; {
		some, err := chosen(only, set.Kind)
		if err != nil {
			return err
		}
		for i, s := range some {
			v, err := runScenario(ctx, s, set, each)
			if err != nil {
				return err
			}
			for _, what := range v.violations() {
				fmt.Fprintln(os.Stderr, "VIOLATION:", s.name+":", what)
				violations = append(violations, what)
			}
			if i < len(verdicts) {
				verdicts[i].add(v)
			} else {
				verdicts = append(verdicts, v)
			}
			fmt.Fprintf(os.Stderr, "%s: %d locks, %d of them by a lease that was retained, %d violations\n",
				s.name, v.granted[before]+v.granted[during]+v.granted[after], v.reused, len(v.violations()))
		}
		if !time.Now().Before(end) {
			break
		}
	}
	printTable(out, verdicts)
	if len(violations) > 0 {
		return fmt.Errorf("%d violations", len(violations))
	}
	return nil
}

// chosen are the scenarios with that in their name that can run on that kind of server. On several servers
// behind one address these are those of the processes; a Cluster is of no other kind; and a failover and back
// is for those that show it: see docs/guarantees.md.
func chosen(only, kind string) (some []scenario, err error) {
	k, err := redistest.KindNamed(cmp.Or(kind, redistest.Plain.Name))
	for _, s := range scenarios {
		can := k.Name == redistest.Plain.Name || !k.IsSharded() && s.masters == 0 || k.IsSharded() && s.behind
		if can && (!s.back || k.ShowsFailovers()) && strings.Contains(s.name, only) {
			some = append(some, s)
		}
	}
	return some, err
}
