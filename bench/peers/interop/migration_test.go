package interop

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// before is what stands around a block of docs/migration.md that shows another library.
const before = `package before

import (
	"context"
	"errors"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
	"golang.org/x/sync/singleflight"
)

var ( // what a block does not use, it still imports
	_ = errors.Is
	_ = time.Second
	_ = redislock.New
	_ = redsync.New
	_ = goredis.NewPool
	_ rueidis.ClientOption
	_ = rueidislock.NewLocker
)

var (
	ctx   context.Context
	rdb   *redis.Client
	addr  string
	group singleflight.Group
	work  func(context.Context) error
	load  func(context.Context, string) ([]byte, error)
)

func snippet() %s {
//line %s:%d
%s}
`

// The code of other libraries in docs/migration.md compiles. (What replaces it is compiled by a test of
// the root module.)
func TestCodeOfOtherLibrariesCompiles(t *testing.T) {
	const page = "../../../docs/migration.md"
	data, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	text, dir, overlay := string(data), t.TempDir(), map[string]string{}
	var packages []string
	for i, at := range regexp.MustCompile("(?ms)^```go before\n(.*?)^```").FindAllStringSubmatchIndex(text, -1) {
		results, code := "error", text[at[2]:at[3]]
		if strings.Contains(code, "return nil, err") {
			results = "([]byte, error)"
		}
		name := fmt.Sprintf("before%d", i)
		source := fmt.Sprintf(before, results, filepath.Base(page), 1+strings.Count(text[:at[2]], "\n"), code)
		file := filepath.Join(dir, name+".go")
		if err := os.WriteFile(file, []byte(source), 0o600); err != nil {
			t.Fatal(err)
		}
		// The package is in this module, so that it gets its dependencies, but not on the disk.
		overlay[filepath.Join(".", name, "snippet.go")] = file
		packages = append(packages, "./"+name)
	}
	if len(packages) < 4 {
		t.Fatalf("%d blocks found", len(packages))
	}
	replace, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		t.Fatal(err)
	}
	list := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(list, replace, 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", append([]string{"build", "-overlay", list}, packages...)...)
	if out, err := build.CombinedOutput(); err != nil {
		t.Errorf("go build: %v\n%s", err, out)
	}
}
