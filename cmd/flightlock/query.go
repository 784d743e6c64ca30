package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/signal"
	"time"

	"github.com/flightlock/flightlock"
)

// queryTTL stands for the ttl in commands that lock nothing: nodes may take as long to answer as with run.
const queryTTL = 10 * time.Second

// query runs do with a Client, until Ctrl-C. It returns the exit code.
func (f *common) query(do func(ctx context.Context, c *flightlock.Client) error) int {
	c, closeClient, err := f.open(queryTTL)
	if err != nil {
		return refuse(err)
	}
	defer closeClient()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	switch err := do(ctx, c); {
	case err == nil:
		return exitOK
	case errors.Is(err, flightlock.ErrInvalid):
		return refuse(err)
	default:
		complain(err)
		if errors.Is(err, flightlock.ErrNotHeld) {
			return exitFailed
		}
	}
	return exitUnavailable
}

// writeJSON writes a value to stdout. One that cannot be written is of no use to anybody.
func writeJSON(v any) { _ = json.NewEncoder(os.Stdout).Encode(v) }
