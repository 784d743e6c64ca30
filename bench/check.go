package main

import (
	"context"
	"fmt"
	"io"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/checkrun"
)

// checkNodes writes what flightlock's Check finds on the servers of -redis. The exit code says
// whether it failed.
func checkNodes(ctx context.Context, cfg config, stdout, stderr io.Writer) int {
	rep, err := runCheck(ctx, cfg, stdout, stderr)
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return exitFailed
	}
	if rep.Status == flightlock.StatusFail {
		return exitFailed
	}
	return exitOK
}

func runCheck(ctx context.Context, cfg config, stdout, stderr io.Writer) (rep flightlock.Report, err error) {
	out, err := openJSON(cfg.jsonPath, stdout)
	if err != nil {
		return rep, err
	}
	defer out.close()
	rep, err = checkrun.Nodes(ctx, flightlock.Options{KeyPrefix: cfg.prefix, NoPrefix: cfg.noPrefix}, cfg.redis)
	if err == nil {
		table := stdout
		if cfg.jsonPath == "-" {
			table = stderr
		}
		fmt.Fprint(table, rep)
		err = out.write(rep)
	}
	return rep, err
}
