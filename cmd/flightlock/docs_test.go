//go:build unix

package main

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/flightlock/flightlock/internal/testkit"
)

// What README says about the command works as it stands there, but for the names of the nodes.
func TestREADME(t *testing.T) {
	text, err := os.ReadFile(testkit.File("README.md"))
	testkit.Must(t, err)
	block := regexp.MustCompile("(?s)```sh\n(go install ./cmd/flightlock .*?)```").FindSubmatch(text)
	if block == nil {
		t.Fatal("README.md has no block of sh that begins with go install ./cmd/flightlock")
	}
	script := strings.Replace(string(block[1]), "redis://a:6379,redis://b:6379,redis://c:6379", nodes(t), 1)
	bin := t.TempDir()
	cmd := exec.Command("sh", "-e", "-c", script)
	cmd.Dir = testkit.File(".")
	cmd.Env = append(os.Environ(), "GOBIN="+bin, "PATH="+bin+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil || !regexp.MustCompile(`^my token is \d+\n$`).Match(out) {
		t.Errorf("%v\n%s\nof\n%s", err, out, script)
	}
}
