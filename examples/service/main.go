// Command service is a small HTTP service as one would build it with flightlock: values of an
// origin cached in Redis, pages made of them, a job that runs once per tick, a leader, and
// transfers in SQL. README.md says where each of these is.
//
//	service -redis redis://a:6379,redis://b:6379,redis://c:6379 -cache redis://d:6379 -origin http://e
//	service -demo
//
// The second form runs four processes of the service through phases of load and faults, and compares
// it with what people write without flightlock.
package main

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/flightlock/flightlock/examples/service/internal/app"
	"github.com/flightlock/flightlock/examples/service/internal/demo"
	"github.com/redis/go-redis/v9/logging"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	logging.Disable()            // go-redis prints every failed dial; flightlock logs a failed node once
	if args, found := cutDemo(os.Args[1:]); found {
		os.Exit(runDemo(ctx, args))
	}
	os.Exit(runService(ctx, os.Args[1:]))
}

// cutDemo returns args without -demo, which may be written with two dashes, as any flag.
func cutDemo(args []string) (rest []string, found bool) {
	rest = slices.DeleteFunc(slices.Clone(args), func(arg string) bool {
		return arg == "-demo" || arg == "--demo"
	})
	return rest, len(rest) < len(args)
}

func runDemo(ctx context.Context, args []string) int {
	flags := flag.NewFlagSet("service -demo", flag.ContinueOnError)
	cfg := demo.Flags(flags)
	if code, done := parse(flags, args); done {
		return code
	}
	return demo.Main(ctx, cfg)
}

func runService(ctx context.Context, args []string) int {
	flags := flag.NewFlagSet("service", flag.ContinueOnError)
	cfg := app.Flags(flags)
	if code, done := parse(flags, args); done {
		return code
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil)).With("process", cfg.Name)
	a, err := app.Open(ctx, *cfg, log)
	if err != nil {
		log.Error("cannot start", "err", err)
		return 1
	}
	if err := a.Run(ctx); err != nil {
		log.Error("ended", "err", err)
		return 1
	}
	return 0
}

// parse reports whether the program is done, and its exit code. flags has printed the reason.
func parse(flags *flag.FlagSet, args []string) (code int, done bool) {
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0, true
	case err != nil:
		return 2, true
	}
	return 0, false
}
