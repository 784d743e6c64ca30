package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// This file is the raw figures: a line of JSON for each run of the program, that says where and
// with what, and one for each rival and bout and round.

type line struct {
	Environment *environment `json:",omitempty"`
	Record      *record      `json:",omitempty"`
}

// environment is the machine, the versions and the date.
type environment struct {
	At       time.Time
	Machine  string
	Go       string
	Server   string
	Versions []string
	Quick    bool
	Rounds   int
	last     time.Time // when the last of its runs began
}

func readEnvironment(ctx context.Context, s *site, cfg config) (*environment, error) {
	server, err := s.version(ctx)
	if err != nil {
		return nil, err
	}
	return &environment{
		At: time.Now().UTC().Round(time.Second), Machine: machine(), Go: runtime.Version(),
		Server: server, Versions: versions(),
		Quick: cfg.quick, Rounds: cfg.rounds,
	}, nil
}

// machine names the processors.
func machine() string {
	name := runtime.GOARCH
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, after, ok := strings.Cut(string(text), "model name"); ok {
			name, _, _ = strings.Cut(strings.TrimLeft(after, "\t: "), "\n")
		}
	}
	return fmt.Sprintf("%d x %s, %s", runtime.NumCPU(), name, runtime.GOOS)
}

// versions are those of the rivals and of what they stand on.
func versions() (all []string) {
	info, _ := debug.ReadBuildInfo()
	if info == nil {
		return nil
	}
	wanted := []string{
		"github.com/go-redsync/redsync/v4", "github.com/bsm/redislock", "github.com/redis/rueidis",
		"github.com/redis/go-redis/v9", "golang.org/x/sync",
	}
	for _, m := range info.Deps {
		if slices.Contains(wanted, m.Path) {
			all = append(all, m.Path+" "+m.Version)
		}
	}
	return all
}

// rawFile is the file that is written.
type rawFile struct {
	f   *os.File
	enc *json.Encoder
}

func openRaw(cfg config) (*rawFile, error) {
	how := os.O_CREATE | os.O_WRONLY | os.O_TRUNC
	if cfg.keep {
		how = os.O_CREATE | os.O_WRONLY | os.O_APPEND
	}
	f, err := os.OpenFile(cfg.rawPath(), how, 0o644)
	if err != nil {
		return nil, err
	}
	return &rawFile{f, json.NewEncoder(f)}, nil
}

func (c config) rawPath() string { return filepath.Join(c.out, c.raw) }

func (r *rawFile) write(l line) error { return r.enc.Encode(l) }

func (r *rawFile) close() { _ = r.f.Close() }

// readRaw reads what was measured.
func readRaw(path string) (envs []environment, records []record, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	for dec := json.NewDecoder(f); ; {
		var l line
		switch err := dec.Decode(&l); {
		case errors.Is(err, io.EOF):
			return envs, records, nil
		case err != nil:
			return nil, nil, fmt.Errorf("%s: %w", path, err)
		}
		if l.Environment != nil {
			envs = append(envs, *l.Environment)
		}
		if l.Record != nil {
			records = append(records, *l.Record)
			if n := len(envs); n > 0 {
				envs[n-1].last = l.Record.At
			}
		}
	}
}
