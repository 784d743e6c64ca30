package main

import (
	"errors"
	"os"
	"strconv"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/election"
)

// elect is election.Campaign: CMD runs while this process leads, and again when it leads again.
func elect(args []string) int {
	j := newJob("elect")
	host, _ := os.Hostname()
	value := j.String("value", host+":"+strconv.Itoa(os.Getpid()),
		"what others read of the leader, such as its address")
	if code, ok := j.parse(args); !ok {
		return code
	}
	if j.NArg() == 0 {
		return refuse(errors.New("NAME is missing: what to lead"))
	}
	j.key, args = j.Arg(0), j.Args()[1:]
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if err := j.check(args); err != nil {
		return refuse(err)
	}
	return j.do(func(c *flightlock.Client) error {
		for {
			err := election.Campaign(j.ctx, c, j.key, *value, j.ttl, j.hold)
			if !errors.Is(err, errLost) || j.stoppedBy() != 0 { // otherwise CMD was ended, but the lock was kept
				return err
			}
		}
	})
}
