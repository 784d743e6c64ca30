package procs_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
)

// A child answers each request, and ends in order when its input ends.
func TestCallsAreAnsweredUntilTheInputEnds(t *testing.T) {
	c := start(t, "server")
	for _, request := range []string{"a", "b"} {
		var reply string
		if err := c.Call(t.Context(), request, &reply); err != nil || reply != request+"!" {
			t.Fatal(reply, err)
		}
	}
	if !c.Alive() {
		t.Error("it has ended too early")
	}
	err := c.End(time.Minute)
	if code := exitCode(err); code != 3 {
		t.Errorf("%v; want exit code 3", err)
	}
	if c.Alive() || c.Wait() != err {
		t.Errorf("Wait: %v", c.Wait())
	}
}

func exitCode(err error) int {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return exit.ExitCode()
	}
	return -1
}

// The end of a caller's ctx ends the child, and by that the call, even if the child does not check
// its own ctx.
func TestACallEndsWithItsContext(t *testing.T) {
	for request, code := range map[string]int{"wait": 3, "hang": 1} {
		t.Run(request, func(t *testing.T) {
			c := start(t, "server")
			why := errors.New("why")
			ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, why)
			defer cancel()
			if err := c.Call(ctx, request, new(string)); !errors.Is(err, why) {
				t.Error(err)
			}
			if err := c.Wait(); exitCode(err) != code {
				t.Errorf("%v; want exit code %d", err, code)
			}
		})
	}
}

// A child that is killed in a call makes it fail.
func TestACallOfAProcessThatIsKilledFails(t *testing.T) {
	c := start(t, "server")
	if err := c.Call(t.Context(), "a", new(string)); err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	go func() { failed <- c.Call(context.Background(), "hang", new(string)) }()
	c.Kill()
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "ended without a reply") {
		t.Error(err)
	}
	if err := c.Signal(os.Kill); !errors.Is(err, os.ErrProcessDone) {
		t.Error(err)
	}
}

// What a child wrote before it ended can be received afterwards.
func TestNothingThatAChildWroteIsLost(t *testing.T) {
	c := start(t, "writer")
	if err := c.Wait(); err != nil {
		t.Fatal(err)
	}
	for n := 0; ; n++ {
		err := c.Receive(new(string))
		if errors.Is(err, io.EOF) && n == 1000 {
			return
		}
		if err != nil {
			t.Fatalf("after %d values, want 1000: %v", n, err)
		}
	}
}

// End does not hang on a child that writes what nobody reads, nor on one that does not end.
func TestEndEndsAChildOfAnyKind(t *testing.T) {
	if err := start(t, "talker").End(time.Minute); err != nil {
		t.Error(err)
	}
	c := start(t, "sleeper")
	var up string
	if err := c.Receive(&up); err != nil {
		t.Fatal(err)
	}
	if err := c.End(10 * time.Millisecond); err == nil || !strings.Contains(err.Error(), "was killed") {
		t.Error(err)
	}
	if c.Alive() {
		t.Error("it still runs")
	}
}

// A program that does not exist is an error of Start, and leaves no goroutine (TestMain checks).
func TestAProgramThatDoesNotExist(t *testing.T) {
	if _, err := procs.Start(exec.Command("/no/such/program")); err == nil {
		t.Error("it was started")
	}
	if _, err := procs.StartChild(exec.Command("/no/such/program")); err == nil {
		t.Error("it was started")
	}
}
