package gocron_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/gocron"
	gocronv2 "github.com/go-co-op/gocron/v2"
)

const period = 100 * time.Second

func client(t *testing.T, nodes *flightlocktest.Nodes) *flightlock.Client {
	c, err := nodes.Client(flightlock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// schedule starts a scheduler with a job each 100 s, whose timer is late.
func schedule(t *testing.T, option gocronv2.SchedulerOption, late time.Duration,
	job func()) (shutdown func()) {
	s, err := gocronv2.NewScheduler(option)
	if err != nil {
		t.Fatal(err)
	}
	start := gocronv2.WithStartAt(gocronv2.WithStartDateTime(time.Now().Add(period + late)))
	_, err = s.NewJob(gocronv2.DurationJob(period), gocronv2.NewTask(job), gocronv2.WithName("job"), start)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	return func() { _ = s.Shutdown() }
}

// Three schedulers whose timers are seconds apart run a short job once each time, and a long one, too.
func TestLocker(t *testing.T) {
	for _, long := range []time.Duration{0, 30 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			nodes := flightlocktest.Start(3)
			defer nodes.Close()
			var running, runs atomic.Int32
			for i := range 3 {
				locker, err := gocron.NewLocker(client(t, nodes), 10*time.Second)
				if err != nil {
					t.Fatal(err)
				}
				defer schedule(t, gocronv2.WithDistributedLocker(locker), time.Duration(i)*3*time.Second, func() {
					if running.Add(1) > 1 {
						t.Error("two run")
					}
					runs.Add(1)
					time.Sleep(long)
					running.Add(-1)
				})()
			}
			time.Sleep(5*period + period/2)
			if runs.Load() != 5 {
				t.Errorf("%d runs, want 5", runs.Load())
			}
		})
	}
}

// Of three schedulers the leader runs the job, and the next one when it has resigned.
func TestElector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes := flightlocktest.Start(3)
		defer nodes.Close()
		var runs [3]int
		var electors [3]*gocron.Elector
		for i := range 3 {
			electors[i] = gocron.NewElector(client(t, nodes), "leader", fmt.Sprint(i), 10*time.Second)
			time.Sleep(time.Second)
			defer schedule(t, gocronv2.WithDistributedElector(electors[i]), 0, func() { runs[i]++ })()
			defer electors[i].Close()
		}
		time.Sleep(3*period + period/2)
		electors[0].Close()
		time.Sleep(time.Second)
		if err := electors[0].IsLeader(t.Context()); !errors.Is(err, gocron.ErrNotLeader) {
			t.Errorf("after Close: %v", err)
		}
		time.Sleep(2 * period)
		if runs[0] != 3 || runs[1]+runs[2] != 2 || runs[1]*runs[2] != 0 {
			t.Errorf("runs: %v", runs)
		}
	})
}

// What cannot be is refused.
func TestBadInput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes := flightlocktest.Start(1)
		defer nodes.Close()
		c := client(t, nodes)
		if _, err := gocron.NewLocker(c, 0); !errors.Is(err, flightlock.ErrInvalid) {
			t.Error(err)
		}
		locker, err := gocron.NewLocker(c, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := locker.Lock(context.Background(), "job"); !errors.Is(err, flightlock.ErrInvalid) {
			t.Error(err)
		}
		e := gocron.NewElector(c, "", "", time.Second)
		synctest.Wait()
		if err := e.IsLeader(context.Background()); !errors.Is(err, flightlock.ErrInvalid) {
			t.Error(err)
		}
		e.Close()
	})
}
