package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9/logging"
)

func main() {
	logging.Disable() // go-redis would write a line for every dial to a node that is stopped
	if os.Getenv(workerEnv) != "" {
		os.Exit(workerMain(os.Stdin, os.Stdout))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := peersMain(ctx, os.Args[1:], os.Stdout)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
}

// config is what the flags say.
type config struct {
	rounds  int
	quick   bool
	only    string
	list    bool
	raw     string // file that figures are appended to
	keep    bool   // what raw holds already
	profile string // directory for profiles of the workers
	report  bool   // write it, and measure nothing
	out     string // directory of the report
	readme  string // file whose chapter is written too, if any

	uncontended uncontended
	permits     bool
	window      time.Duration // of each row of -permits
}

func parseFlags(args []string) (c config, err error) {
	f := flag.NewFlagSet("peers", flag.ContinueOnError)
	f.IntVar(&c.rounds, "rounds", 0,
		"rounds, in each of which every rival does every load once (default 5; 1 with -quick)")
	f.BoolVar(&c.quick, "quick", false, "short loads: about 5 minutes in all")
	f.StringVar(&c.only, "only", "",
		"measure these loads only, by group or by name, separated by semicolons; -list shows them")
	f.BoolVar(&c.list, "list", false, "list the loads and end")
	f.StringVar(&c.raw, "raw", "raw.jsonl", "file of the raw figures, in the directory of -out")
	f.BoolVar(&c.keep, "append", false, "keep what the file of -raw holds, and add to it: a long run in pieces")
	f.StringVar(&c.profile, "profile", "",
		"write profiles of every process to this directory; the figures say little then")
	f.BoolVar(&c.report, "report", false, "measure nothing, write the report of what the file of -raw holds")
	f.StringVar(&c.out, "out", ".", "directory of the report: RESULTS.md, plots, raw figures")
	f.StringVar(&c.readme, "readme", "", "a README.md whose performance table is to be written as well")
	c.uncontended.register(f)
	f.BoolVar(&c.permits, "permits", false,
		"compare a semaphore with a counter on each node: how many it admits, "+
			"print a table, and measure nothing else")
	f.DurationVar(&c.window, "window", time.Second, "of -permits: length of a measurement")
	if err := f.Parse(args); err != nil {
		return c, err
	}
	if f.NArg() > 0 {
		return c, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if c.rounds == 0 {
		c.rounds = 5
		if c.quick {
			c.rounds = 1
		}
	}
	if c.rounds < 1 {
		return c, fmt.Errorf("-rounds %d: at least 1", c.rounds)
	}
	return c, c.uncontended.check()
}

func peersMain(ctx context.Context, args []string, stdout io.Writer) error {
	cfg, err := parseFlags(args)
	if err != nil {
		return err
	}
	if cfg.uncontended.on {
		return cfg.uncontended.run(ctx, stdout)
	}
	if cfg.permits {
		return runPermits(ctx, cfg.window, stdout)
	}
	p := fullPace
	if cfg.quick {
		p = quickPace
	}
	all := allBouts(p)
	if cfg.list {
		for _, b := range all {
			fmt.Fprintln(stdout, b.id())
		}
		return nil
	}
	for _, dir := range []string{cfg.out, cfg.profile} {
		if dir == "" {
			continue
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if !cfg.report {
		if err := measureAll(ctx, cfg, all); err != nil {
			return err
		}
	}
	return writeReport(cfg, stdout)
}
