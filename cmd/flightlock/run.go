package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/semaphore"
)

// run is Client.Do: CMD is the function. With -n its lock is a permit of a semaphore.
func run(args []string) int {
	j := newJob("run")
	j.StringVar(&j.key, "key", "", "the `NAME` to lock")
	try := j.Bool("try", false, "make one attempt: exit 75 at once if another has the lock")
	wait := j.Duration("wait", 0,
		"wait so long for the lock, and for nodes that cannot be reached\n(default: no limit)")
	permits := j.Int("n", 0, "how many may run at once, on all machines: NAME is a semaphore then, and no lock")
	if code, ok := j.parse(args); !ok {
		return code
	}
	err := j.check(j.Args())
	switch {
	case j.key == "":
		err = errors.New("-key: the name to lock is missing")
	case *try && *wait != 0:
		err = errors.New("-try and -wait: use one of them")
	case *permits < 0:
		err = fmt.Errorf("-n %d: it must not be negative", *permits)
	case *wait < 0:
		err = fmt.Errorf("-wait %v: it must not be negative", *wait)
	}
	if err != nil {
		return refuse(err)
	}
	began := time.Now()
	return j.do(func(c *flightlock.Client) error {
		for {
			var retry flightlock.RetryStrategy // nil: no limit
			if *try {
				retry = flightlock.NoRetry()
			} else if *wait > 0 {
				retry = flightlock.Within(nil, max(*wait-time.Since(began), 1))
			}
			err := j.lock(c, *permits, *try, retry)
			if j.ran || *try || j.ctx.Err() != nil || !errors.Is(err, flightlock.ErrLockLost) {
				return err
			} // otherwise it was granted, and lost before CMD began
		}
	})
}

// lock is Client.Do, or with permits one of these.
func (j *job) lock(c *flightlock.Client, permits int, try bool, retry flightlock.RetryStrategy) error {
	if permits == 0 {
		return c.Do(j.ctx, j.key, j.ttl, retry, j.hold)
	}
	s, err := semaphore.New(c, j.key, permits)
	if err != nil {
		return err
	}
	var l *flightlock.Lock
	if try {
		l, err = s.TryAcquire(j.ctx, j.ttl) // each permit
	} else {
		l, err = s.Acquire(j.ctx, j.ttl, retry)
	}
	if err != nil {
		return err
	}
	return j.under(l)
}
