package sharing

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/procs"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
)

// oldVersion is the last commit whose scripts had other arguments, and other names for offers.
const oldVersion = "20564e099b82d0bb8a69565f311e35b191cc1ef1"

// While a deployment changes from old clients to new ones, both are on the same nodes: they exclude each
// other, and tokens rise. They wait in one queue, in which each kind makes turns for the other. make soak
// compiles the old version.
func TestOldClientsAndNewOnesExcludeEachOther(t *testing.T) {
	t.Parallel()
	redistest.OnlyLong(t)
	redistest.Require(t)
	program := buildOldClient(t)
	servers, _ := lockkit.StartNodes(t, 3)
	var urls []string
	for _, s := range servers {
		urls = append(urls, "redis://"+s.Addr())
	}

	const each = 20 // so often each client has the lock, at least
	var holder, last atomic.Int64
	var locks [4]atomic.Int64
	hold := func(i int, fence int64) {
		if !holder.CompareAndSwap(0, fence) {
			t.Errorf("two holders: %d and %d, of client %d", holder.Load(), fence, i)
		}
		if before := last.Swap(fence); before >= fence {
			t.Errorf("client %d has token %d after %d", i, fence, before)
		}
		time.Sleep(rand.N(2 * time.Millisecond)) // its work
		locks[i].Add(1)
		holder.CompareAndSwap(fence, 0)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	enough := func() bool {
		for i := range locks {
			if locks[i].Load() < each && ctx.Err() == nil {
				return false
			}
		}
		return true
	}
	var wg sync.WaitGroup
	for i := range locks {
		if i%2 == 0 {
			old, err := procs.StartChild(&exec.Cmd{
				Path: program, Args: append([]string{program, "k"}, urls...), Stderr: os.Stderr,
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(old.Kill)
			wg.Go(func() {
				for !enough() {
					var fence int64
					if err := old.Receive(&fence); err != nil {
						t.Errorf("old client %d: %v", i, err)
						return
					}
					hold(i, fence)
					if err := old.Send("release it"); err != nil {
						t.Errorf("old client %d: %v", i, err)
					}
				}
				old.Kill()
			})
			continue
		}
		c := lockkit.Open(t, lockkit.Patient, urls...)
		wg.Go(func() {
			for !enough() {
				l, err := c.SingleFlightLock(ctx, "k", 50*time.Second, nil)
				if err != nil {
					t.Errorf("new client %d: %v", i, err)
					return
				}
				hold(i, l.Fence())
				if err := l.Release(ctx); err != nil {
					t.Errorf("new client %d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
	for i := range locks {
		if locks[i].Load() < each {
			t.Errorf("client %d has had the lock %d times only", i, locks[i].Load())
		}
	}
}

// buildOldClient builds the program in testdata within the old version, which is in the history of this
// repository.
func buildOldClient(t *testing.T) (program string) {
	t.Helper()
	git := exec.Command("git", "archive", oldVersion, "go.mod", "go.sum", "lua", "internal", ":(glob)*.go")
	git.Dir = filepath.Join("..", "..")
	archive, err := git.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = errors.New(string(exit.Stderr))
		}
		t.Skipf("NOT TESTED with clients of an old version: "+
			"its history is not here (a shallow clone, or no git): %v",
			err)
	}
	dir := t.TempDir()
	for files := tar.NewReader(bytes.NewReader(archive)); ; {
		file, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Join(dir, filepath.FromSlash(file.Name))
		switch file.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(name, 0o700)
		case tar.TypeReg:
			var text []byte
			if text, err = io.ReadAll(files); err == nil {
				err = os.WriteFile(name, text, 0o600)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	main, err := os.ReadFile(filepath.Join("testdata", "oldclient", "main.go"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "oldclient"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "oldclient", "main.go"), main, 0o600); err != nil {
		t.Fatal(err)
	}
	program = filepath.Join(dir, "old")
	build := exec.Command("go", "build", "-o", program, "./oldclient")
	build.Dir = dir
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}
