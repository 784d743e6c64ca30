package redistest

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/redis/go-redis/v9"
)

// AppendOnly is what a server's append-only file held at a moment.
type AppendOnly struct{ files map[string][]byte } // by path below the server's directory

// SaveAppendOnly takes a copy of the append-only file as it is now, with all that the server was told before.
// Under appendfsync everysec, that is what a machine that loses power up to a second later still has on its
// disk. The server must be up.
func (s *Server) SaveAppendOnly() (AppendOnly, error) {
	a := AppendOnly{files: map[string][]byte{}}
	err := s.change("save the append-only file of", func() error {
		if err := s.awaitAppendOnly(); err != nil {
			return err
		}
		return s.eachAppendOnly(func(path string) error {
			data, err := os.ReadFile(path)
			a.files[path] = data
			return err
		})
	})
	return a, err
}

// awaitAppendOnly waits until the server has written to its append-only file what it was told. Under
// appendfsync everysec it may answer first, for it puts the write off while an fsync is under way.
func (s *Server) awaitAppendOnly() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	written := poll(ctx, func() bool {
		info, err := s.command(ctx, "INFO", "persistence")
		if redis.IsPermissionError(err) {
			return true // the test has taken the right away: nobody can know
		}
		return err == nil && infoFields(info.(string))["aof_buffer_length"] == "0"
	})
	if !written {
		return errors.New("its append-only file is not written")
	}
	return nil
}

// RestartFrom kills the process and starts another one on the append-only file that was
// saved: the server forgets what it was told since. (A killed process by itself forgets
// nothing that it had written: that is with the kernel.)
func (s *Server) RestartFrom(a AppendOnly) error {
	return s.change("restart from an old append-only file", func() error {
		s.proc.Kill()
		if err := s.eachAppendOnly(os.Remove); err != nil {
			return err
		}
		for path, data := range a.files {
			if err := os.WriteFile(path, data, 0o600); err != nil {
				return err
			}
		}
		return s.startAgainLocked()
	})
}

// eachAppendOnly calls f for every file that an append-only file consists of: one up to
// Redis 6, several in a directory of their own since.
func (s *Server) eachAppendOnly(f func(path string) error) error {
	return filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasPrefix(d.Name(), "appendonly.aof") {
			return err
		}
		return f(path)
	})
}
