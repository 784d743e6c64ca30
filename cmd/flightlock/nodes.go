package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/flightlock/flightlock"
	"github.com/redis/go-redis/v9"
)

// common are the flags that all commands have.
type common struct {
	*flag.FlagSet
	redis  string
	demo   bool
	json   bool
	prefix string
	maxTTL time.Duration
}

// nodesVariable has the nodes if -redis is not given. Unlike an argument, the environment of a process is not
// shown to other users, so it is the place for passwords.
const nodesVariable = "FLIGHTLOCK_REDIS"

// flags are those of the command of that name.
func flags(name string) *common {
	f := &common{FlagSet: flag.NewFlagSet("flightlock "+name, flag.ContinueOnError)}
	f.StringVar(&f.redis, "redis", "",
		"the nodes, separated by commas: host:port, or URLs as flightlock.Open has them\n"+
			"(default: those of "+nodesVariable+")")
	f.BoolVar(&f.demo, "demo", false, "try it on three nodes in this process, which nobody else can reach")
	f.BoolVar(&f.json, "json", false, "write JSON")
	f.StringVar(&f.prefix, "prefix", "lock:",
		"Options.KeyPrefix of the clients that use these locks; '' for none")
	f.DurationVar(&f.maxTTL, "max-ttl", time.Minute, "Options.MaxTTL of the clients that use these locks")
	for _, c := range commands() {
		if c.name == name {
			f.Usage = func() {
				fmt.Fprintf(f.Output(), "usage: flightlock %s %s\n\n%s\n\n", c.name, c.args, c.does)
				f.PrintDefaults()
			}
		}
	}
	return f
}

// parse reads args. If ok is false, the command ends with that code.
func (f *common) parse(args []string) (code int, ok bool) {
	f.SetOutput(os.Stderr)
	switch err := f.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return exitOK, false
	case err != nil: // it was reported
		return exitUsage, false
	}
	if f.json {
		slog.SetDefault(slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	}
	return 0, true
}

// urls are the nodes, as Open wants them.
func (f *common) urls() (urls []string, err error) {
	if f.redis == "" {
		f.redis = os.Getenv(nodesVariable)
	}
	if f.redis == "" {
		return nil, errors.New("no nodes: name them with -redis, or in " + nodesVariable + ", or try it with -demo")
	}
	for node := range strings.SplitSeq(f.redis, ",") {
		if node = strings.TrimSpace(node); !strings.Contains(node, "://") {
			node = "redis://" + node
		}
		urls = append(urls, node)
	}
	return urls, nil
}

// nodeTimeout is a twentieth of the ttl, so that what is done when a lock is about to be lost is done in
// time, and at least the default of the library.
func nodeTimeout(ttl time.Duration) time.Duration { return max(ttl/20, 50*time.Millisecond) }

// nodes are the options of a Client and its nodes. An error is one of usage. stop ends the nodes of -demo.
func (f *common) nodes(ttl time.Duration) (opts flightlock.Options, urls []string, stop func(), err error) {
	redis.SetLogger(silent{}) // the Client logs what becomes of nodes
	opts = flightlock.Options{KeyPrefix: f.prefix, NoPrefix: f.prefix == "", MaxTTL: f.maxTTL,
		NodeTimeout: nodeTimeout(ttl), Logger: slog.Default()}
	if !f.demo {
		urls, err = f.urls()
		return opts, urls, func() {}, err
	}
	if f.redis != "" {
		return opts, nil, nil, errors.New("-demo has nodes of its own: leave -redis out")
	}
	opts.DisableQuarantine = true // these nodes lose nothing
	urls, stop, err = embedded()
	return opts, urls, stop, err
}

// open makes the Client for locks of that ttl. An error is one of usage: nothing has been sent. close ends
// the Client, and the nodes of -demo.
func (f *common) open(ttl time.Duration) (c *flightlock.Client, close func(), err error) {
	opts, urls, stop, err := f.nodes(ttl)
	if err != nil {
		return nil, nil, err
	}
	if c, err = flightlock.Open(opts, urls...); err != nil {
		stop()
		return nil, nil, err
	}
	return c, func() {
		// Nothing is held any more, so this waits for connections only. Those that hang are dropped.
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = c.Close(ctx)
		stop()
	}, nil
}

// silent is go-redis' logger.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// embedded starts the nodes of -demo.
func embedded() (urls []string, stop func(), err error) {
	var nodes []*miniredis.Miniredis
	stop = func() {
		for _, n := range nodes {
			n.Close()
		}
	}
	for range 3 {
		n, err := miniredis.Run()
		if err != nil {
			stop()
			return nil, nil, fmt.Errorf("-demo: starting a node: %w", err)
		}
		n.ClockTTL(true) // else nothing expires there
		nodes = append(nodes, n)
		urls = append(urls, "redis://"+n.Addr())
	}
	return urls, stop, nil
}

// noArguments reports arguments of a command that has none.
func (f *common) noArguments() error {
	if f.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	return nil
}
