package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/checkrun"
)

// check is Client.Check, as a table or as JSON.
func check(args []string) int {
	f := flags("check")
	nodeTimeout := f.Duration("node-timeout", 50*time.Millisecond,
		"Options.NodeTimeout of the clients that use these locks")
	if code, ok := f.parse(args); !ok {
		return code
	}
	if err := f.noArguments(); err != nil {
		return refuse(err)
	}
	opts, urls, stop, err := f.nodes(queryTTL)
	if err != nil {
		return refuse(err)
	}
	defer stop()
	opts.NodeTimeout = *nodeTimeout
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	rep, err := checkrun.Nodes(ctx, opts, urls)
	if err != nil {
		return refuse(err)
	}
	if f.json {
		writeJSON(rep)
	} else {
		fmt.Print(rep)
	}
	if rep.Status == flightlock.StatusFail {
		return exitFailed
	}
	return exitOK
}
