package main

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"
)

// A wrong flag is exit code 2, before anything is started, with an error that names the flag, the
// value and the limit.
func TestWrongFlagsNameFlagValueAndLimit(t *testing.T) {
	tests := []struct {
		args string
		want []string
	}{
		{"-clients 0", []string{"-clients", `"0"`, "1 to 64"}},
		{"-clients 65", []string{"-clients", `"65"`, "1 to 64"}},
		{"-clients many", []string{"-clients", `"many"`, "1 to 64"}},
		{"-procs -1", []string{"-procs", `"-1"`, "0 to 64"}},
		{"-procs 5 -clients 4", []string{"-procs 5", "at most", "4"}},
		{"-callers 0", []string{"-callers", `"0"`, "1 to 100000"}},
		{"-goroutines 100001", []string{"-goroutines", `"100001"`, "100000"}},
		{"-goroutines 100000 -clients 5", []string{"-goroutines 100000", "500000", "400000"}},
		{"-callers 100000 -clients 5", []string{"-callers 100000", "500000", "400000"}},
		{"-duration 1", []string{"-duration", `"1"`, "300ms to 10m"}},
		{"-duration 299ms", []string{"-duration", `"299ms"`, "300ms to 10m"}},
		{"-duration 11m", []string{"-duration", `"11m"`, "300ms to 10m"}},
		{"-work -1ms", []string{"-work", `"-1ms"`, "0s to 1s"}},
		{"-work 1001ms", []string{"-work", `"1001ms"`, "0s to 1s"}},
		{"-polling -1", []string{"-polling", `"-1"`, "0 to 64"}},
		{"-polling 65", []string{"-polling", `"65"`, "0 to 64"}},
		{"-polling 5 -clients 4", []string{"-polling 5", "at most", "4"}},
		{"-linger -1ms", []string{"-linger", `"-1ms"`, "0s to 1m"}},
		{"-linger 61s", []string{"-linger", `"61s"`, "0s to 1m"}},
		{"-only d", []string{"-only", `"d"`, "some of a, b, c"}},
		{"-only a,", []string{"-only", `"a,"`, "some of a, b, c"}},
		{"-only ab", []string{"-only", `"ab"`, "some of a, b, c"}},
		{"-only=", []string{"-only", "some of a, b, c"}},
		{"-redis localhost", []string{"-redis", "localhost", "port"}},
		{"-redis a:1,a:1", []string{"-redis", "a:1 is there twice"}},
		{"-redis a:1,", []string{"-redis", "port is missing"}},
		{"-redis http://a:1", []string{"-redis", "http://a:1", "redis://"}},
		{"-redis a:1," + manyNodes(15), []string{"-redis", "16 servers", "at most 15"}},
		{"-check", []string{"-check", "-redis"}},
		{"-prefix x", []string{"-prefix", "-check"}},
		{"-json=", []string{"-json", "want a file name"}},
		{"-nonsense", []string{"-nonsense"}},
		{"extra", []string{`"extra"`}},
	}
	for _, tt := range tests {
		t.Run(tt.args, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if code := benchMain(context.Background(), strings.Fields(tt.args), &stdout, &stderr); code != exitUsage {
				t.Errorf("exit code %d, want %d", code, exitUsage)
			}
			for _, w := range tt.want {
				if !strings.Contains(stderr.String(), w) {
					t.Errorf("stderr %q does not say %q", stderr.String(), w)
				}
			}
			if stdout.Len() > 0 {
				t.Errorf("stdout %q, want nothing", stdout.String())
			}
		})
	}
}

func manyNodes(n int) string {
	var hosts []string
	for i := range n {
		hosts = append(hosts, strings.Repeat("b", i+1)+":1")
	}
	return strings.Join(hosts, ",")
}

func TestDefaultsAreThoseOfTheHelpText(t *testing.T) {
	cfg, err := parseFlags(nil)
	if err != nil {
		t.Fatal(err)
	}
	if cfg.clients != 4 || cfg.procs != 0 || cfg.callers != 1000 || cfg.goroutines != 250 ||
		cfg.duration != 5*time.Second || cfg.redis != nil || cfg.work != 0 || cfg.polling != 0 || cfg.linger != 0 ||
		!cfg.runs("a") || !cfg.runs("b") || !cfg.runs("c") {
		t.Errorf("defaults are %+v", cfg)
	}
}

// Every process needs a client, so -procs alone raises the number of clients.
func TestProcsAloneRaisesClients(t *testing.T) {
	cfg, err := parseFlags([]string{"-procs", "9"})
	if err != nil || cfg.clients != 9 {
		t.Errorf("clients %d, error %v; want 9, nil", cfg.clients, err)
	}
}

func TestOnlyNamesThePhasesToRun(t *testing.T) {
	cfg, err := parseFlags([]string{"-only", "c, a"})
	if err != nil || !cfg.runs("a") || cfg.runs("b") || !cfg.runs("c") {
		t.Errorf("phases %q, error %v; want a and c", cfg.only, err)
	}
}

func TestNodesAreHostPortsOrURLs(t *testing.T) {
	got, err := parseNodes("127.0.0.1:1, redis://u:p@h:2/3,[::1]:4,rediss://s:5")
	want := "redis://127.0.0.1:1 redis://u:p@h:2/3 redis://[::1]:4 rediss://s:5"
	if err != nil || strings.Join(got, " ") != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

func TestHelpGoesToStdoutAndNamesEveryFlag(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if code := benchMain(context.Background(), []string{"-h"}, &stdout, &stderr); code != exitOK {
		t.Errorf("exit code %d, want 0", code)
	}
	for _, f := range []string{
		"-redis", "-clients", "-procs", "-callers", "-goroutines", "-duration", "-work", "-polling", "-linger",
		"-only", "-json", "-h",
	} {
		if !strings.Contains(stdout.String(), "\n  "+f+" ") {
			t.Errorf("the help text does not explain %s", f)
		}
	}
	if stderr.Len() > 0 {
		t.Errorf("stderr %q, want nothing", stderr.String())
	}
}
