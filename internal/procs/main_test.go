package procs_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
	"go.uber.org/goleak"
)

// childEnv says what the test binary is as a child.
const childEnv = "PROCS_TEST_CHILD"

// grace is how long a call may go on in a child that has lost its input.
const grace = 300 * time.Millisecond

func TestMain(m *testing.M) {
	switch os.Getenv(childEnv) {
	case "":
		goleak.VerifyTestMain(m)
	case "sleeper": // ignores the end of its stdin
		fmt.Println(`"up"`)
		forever()
	case "server":
		if procs.Serve(os.Stdin, os.Stdout, grace, answer) != nil {
			os.Exit(2)
		}
		os.Exit(3)
	case "writer": // writes less than a pipe holds
		write(1000)
	case "talker": // writes more
		write(10_000)
	case "parent":
		os.Exit(parent())
	}
}

// forever is not select {}, which the runtime takes for a deadlock.
func forever() {
	for {
		time.Sleep(time.Hour)
	}
}

func write(lines int) {
	for range lines {
		fmt.Println(`"0123456789012345678901234567890123456789"`)
	}
	os.Exit(0)
}

func answer(ctx context.Context, request string) string {
	switch request {
	case "wait":
		<-ctx.Done()
	case "hang":
		forever()
	}
	return request + "!"
}

// parent starts a child, reports its process id, and waits to be killed.
func parent() int {
	cmd, err := procs.Self(childEnv + "=sleeper")
	if err != nil {
		return 1
	}
	c, err := procs.StartChild(cmd)
	if err != nil {
		return 1
	}
	fmt.Println(c.PID())
	_, _ = io.Copy(io.Discard, bufio.NewReader(os.Stdin))
	forever()
	return 0
}

func start(t *testing.T, role string) *procs.Child {
	t.Helper()
	c, err := procs.StartChild(self(t, role))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Kill()
		_ = c.End(time.Minute)
	})
	return c
}

func self(t *testing.T, role string) *exec.Cmd {
	t.Helper()
	cmd, err := procs.Self(childEnv + "=" + role)
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}
