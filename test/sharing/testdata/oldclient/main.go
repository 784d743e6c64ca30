// Oldclient is built within an old version of this module, by TestOldClientsAndNewOnesExcludeEachOther. It
// locks the key of its first argument on the nodes of the others, again and again: it writes each lock's
// token, as a line, and releases the lock when it has read one.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/flightlock/flightlock"
)

func main() {
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "the old client:", err)
		os.Exit(1)
	}
}

func run(key string, urls []string) error {
	ctx, answers := context.Background(), bufio.NewScanner(os.Stdin)
	c, err := flightlock.Open(flightlock.Options{NodeTimeout: 20 * time.Second}, urls...)
	if err != nil {
		return err
	}
	for {
		l, err := c.SingleFlightLock(ctx, key, 50*time.Second, nil)
		if err != nil {
			return err
		}
		fmt.Println(l.Fence())
		if !answers.Scan() {
			return nil
		}
		if err := l.Release(ctx); err != nil {
			return err
		}
	}
}
