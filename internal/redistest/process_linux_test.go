package redistest

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"
)

// A test binary that is killed takes its servers with it.
func TestServerDiesWithItsParent(t *testing.T) {
	Require(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), crashEnv+"=1", "TMPDIR="+t.TempDir()) // nobody removes its files
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	var pid int
	if _, err := fmt.Sscanf(line, "pid %d", &pid); err != nil {
		t.Errorf("the child says %q", line)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if pid != 0 {
		// Dead is enough: nobody here is its parent, to reap it.
		Eventually(t, 10*time.Second, "the orphan is dead", func() bool { return gone(pid) || stateOf(pid) == 'Z' })
	}
}
