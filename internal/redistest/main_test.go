package redistest

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// crashEnv makes the test binary play the part of one that is killed.
const crashEnv = "REDISTEST_LAUNCH_AND_HANG"

func TestMain(m *testing.M) {
	if os.Getenv(crashEnv) != "" {
		launchAndHang()
	}
	goleak.VerifyTestMain(m)
}

// launchAndHang starts a server, says its process id and waits to be killed.
func launchAndHang() {
	s, err := Launch()
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	fmt.Println("pid", s.Pid())
	select {}
}

// dialRaw connects without a Redis client. The connection is closed in the cleanup and
// gives up after a while.
func dialRaw(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

// A spyTB records how a test would have ended.
type spyTB struct {
	testing.TB
	skipped, failed string
}

func (s *spyTB) Helper() {}

func (s *spyTB) Skipf(format string, args ...any) {
	s.skipped = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func (s *spyTB) Fatalf(format string, args ...any) {
	s.failed = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func (s *spyTB) run(f func(testing.TB)) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(s)
	}()
	<-done
}
