package rediscache

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
)

// A request that is made while a server is probed ends also if a hook of the client's ends its goroutine, or panics.
func TestAHookThatEndsTheGoroutineOfARequest(t *testing.T) {
	for what, hook := range map[string]func(){"Goexit": runtime.Goexit, "panic": func() { panic("a bug in a hook") }} {
		ended := make(chan error, 1)
		go func() {
			_, err := untilFailed(make(chan struct{}), func() (int, error) {
				hook()
				return 0, nil
			})
			ended <- err
		}()
		select {
		case err := <-ended:
			var p *flightlock.PanicError
			if !errors.Is(err, errGoexit) && !errors.As(err, &p) {
				t.Errorf("%s: %v", what, err)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s: the caller waits for ever", what)
		}
	}
}
