// Command bench shows on one page what flightlock does for a service: a cache stampede that loads
// once, a hot key that thousands of goroutines want, and a node that dies in the middle of it. It
// checks what it shows.
//
//	go run ./bench      three embedded nodes, about 15 seconds
//	go run ./bench -check -redis host:port,...   are these servers fit to lock on?
//	go run ./bench -h   everything else
//
// For figures to tune by, use the benchmarks beside it: go test -bench . ./bench
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

	"github.com/flightlock/flightlock/internal/progress"
	"github.com/redis/go-redis/v9/logging"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1 // a check failed, or the run could not be completed
	exitUsage  = 2
)

func main() {
	logging.Disable() // go-redis would write a line for every dial to the node that is dead in (c)
	if os.Getenv(childEnv) != "" {
		os.Exit(childMain(os.Stdin, os.Stdout))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := benchMain(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// benchMain is main with its surroundings as arguments.
func benchMain(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cfg, err := parseFlags(args)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(stdout, helpText)
		return exitOK
	}
	if err != nil {
		fmt.Fprintf(stderr, "bench: %v\nrun with -h for help\n", err)
		return exitUsage
	}
	if cfg.check {
		return checkNodes(ctx, cfg, stdout, stderr)
	}
	return execute(ctx, cfg, stdout, stderr)
}

// execute runs the bench that cfg describes and returns the exit code.
func execute(ctx context.Context, cfg config, stdout, stderr io.Writer) int {
	rep, err := runAndWrite(ctx, cfg, stdout, stderr)
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return exitFailed
	}
	if rep.ViolationCount > 0 {
		return exitFailed
	}
	return exitOK
}

// runAndWrite runs the bench and writes its table and its JSON. The JSON file is opened first, so
// that a path that cannot be written fails before the run and not after it.
func runAndWrite(ctx context.Context, cfg config, stdout, stderr io.Writer) (*report, error) {
	out, err := openJSON(cfg.jsonPath, stdout)
	if err != nil {
		return nil, err
	}
	defer out.close()
	bar := progress.New(stderr)
	rep, err := runBench(ctx, cfg, bar)
	bar.Close()
	if err != nil {
		return nil, err
	}
	table := stdout
	if cfg.jsonPath == "-" {
		table = stderr
	}
	writeTable(table, rep)
	return rep, out.write(rep)
}
