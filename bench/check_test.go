package main

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
)

// -check shows a table, or JSON, and its exit code is that of the worst finding.
func TestCheck(t *testing.T) {
	s := redistest.StartServer(t)
	run := func(args ...string) (code int, stdout, stderr string) {
		var o, e bytes.Buffer
		code = benchMain(context.Background(), args, &o, &e)
		return code, o.String(), e.String()
	}
	code, stdout, stderr := run("-check", "-redis", s.Addr())
	if code != exitOK || !strings.Contains(stdout, s.Addr()) || !strings.Contains(stdout, "0 fail") {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	s.Do(t, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
	s.Do(t, "CONFIG", "SET", "maxmemory", "64mb")
	code, stdout, stderr = run("-check", "-json", "-", "-prefix", "", "-redis", s.Addr())
	var rep flightlock.Report
	if err := json.Unmarshal([]byte(stdout), &rep); err != nil || rep.Status != flightlock.StatusFail {
		t.Errorf("stdout %q: %v", stdout, err)
	}
	if code != exitFailed || !strings.Contains(stderr, "1 fail") {
		t.Errorf("exit code %d, stderr %q", code, stderr)
	}
	if code, _, stderr = run("-check", "-redis", redistest.RefusedAddr(t)); code != exitFailed {
		t.Errorf("refused: exit code %d, stderr %q", code, stderr)
	}
}
