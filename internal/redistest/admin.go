package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// adminTimeout is how long a server may take over one of our own commands.
const adminTimeout = 10 * time.Second

// plain turns off what a go-redis client does on its own: announcing itself, asking for
// maintenance events, retrying commands and dials. What a test counts is then what it sent.
func plain(o *redis.Options) {
	o.DisableIdentity = true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	o.MaxRetries = -1
	o.DialerRetries = 1
}

// Client returns a go-redis client of the server with default options, changed by
// the given functions in turn. It is closed in the test's cleanup.
func (s *Server) Client(tb testing.TB, change ...func(*redis.Options)) *redis.Client {
	tb.Helper()
	o := &redis.Options{Addr: s.Addr(), Password: s.password()}
	if name := os.Getenv(EnvKind); name != "" {
		o.Addr = StartNamed(tb, name, s.Addr()).Addr()
	}
	return newClient(tb, o, change)
}

// newClient makes the client and closes it in the test's cleanup.
func newClient(tb testing.TB, o *redis.Options, change []func(*redis.Options)) *redis.Client {
	for _, f := range change {
		f(o)
	}
	c := redis.NewClient(o)
	tb.Cleanup(func() { closeClient(tb, c) })
	return c
}

// closeClient closes a client that the test may have closed itself.
func closeClient(tb testing.TB, c redis.UniversalClient) {
	if err := c.Close(); err != nil && !errors.Is(err, redis.ErrClosed) {
		tb.Errorf("closing a client: %v", err)
	}
}

// password is the one that the server's args ask for, if any.
func (s *Server) password() string {
	if i := slices.Index(s.args, "--requirepass"); i >= 0 && i+1 < len(s.args) {
		return s.args[i+1]
	}
	return ""
}

// admin runs f with a client that nobody else uses, on one connection. It dials itself
// because go-redis prints a log line for every refused dial, and we poll.
func (s *Server) admin(ctx context.Context, f func(*redis.Client) error) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.Addr())
	if err != nil {
		return err
	}
	o := &redis.Options{
		Addr: s.Addr(), Password: s.password(), Protocol: 2, PoolSize: 1, ContextTimeoutEnabled: true,
		Dialer: func(context.Context, string, string) (net.Conn, error) { return conn, nil },
	}
	plain(o)
	c := redis.NewClient(o)
	defer conn.Close() // in case the client never dialled
	return errors.Join(f(c), c.Close())
}

// command executes one command on a connection of its own. A null reply is a nil value.
func (s *Server) command(ctx context.Context, args ...any) (v any, err error) {
	err = s.admin(ctx, func(c *redis.Client) error {
		v, err = c.Do(ctx, args...).Result()
		if errors.Is(err, redis.Nil) {
			return nil
		}
		return err
	})
	return v, err
}

// Do executes one command on a connection of its own and returns the reply: a string,
// int64, []any or nil. An error reply ends the test.
func (s *Server) Do(tb testing.TB, args ...any) any {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), adminTimeout)
	defer cancel()
	v, err := s.command(ctx, args...)
	if err != nil {
		tb.Fatalf("redis-server %s: %v: %v", s.Addr(), args, err)
	}
	return v
}

// Refused returns the entries of the server's ACL LOG, but for CLIENT SETINFO, which go-redis sends to all
// and Redis 7.0 does not know.
func (s *Server) Refused(tb testing.TB) (entries []string) {
	tb.Helper()
	log, _ := s.Do(tb, "ACL", "LOG").([]any)
	for _, entry := range log {
		if text := fmt.Sprint(entry); !strings.Contains(text, "client|setinfo") {
			entries = append(entries, text)
		}
	}
	return entries
}

// Keys returns the names of all keys of database 0, sorted.
func (s *Server) Keys(tb testing.TB) []string {
	tb.Helper()
	keys := []string{}
	for _, k := range s.Do(tb, "KEYS", "*").([]any) {
		keys = append(keys, k.(string))
	}
	slices.Sort(keys)
	return keys
}

// CommandCalls returns how often each command was called since the process began (or since
// CONFIG RESETSTAT), by lower-case name: "evalsha", and with a subcommand "script|load".
// It counts every client's calls, those that scripts make, and those of this package: its
// look whether the server is up calls ping, info and hello; Do adds a hello of its own.
func (s *Server) CommandCalls(tb testing.TB) map[string]int64 {
	tb.Helper()
	calls := map[string]int64{}
	for name, stat := range infoFields(s.Do(tb, "INFO", "commandstats").(string)) {
		name, isCommand := strings.CutPrefix(name, "cmdstat_")
		first, _, _ := strings.Cut(stat, ",")
		n, err := strconv.ParseInt(strings.TrimPrefix(first, "calls="), 10, 64)
		if isCommand && err == nil {
			calls[name] = n
		}
	}
	return calls
}

// CPU is the processor time that the server has used so far, also for commands.
func (s *Server) CPU(tb testing.TB) (used time.Duration) {
	tb.Helper()
	info := infoFields(s.Do(tb, "INFO", "cpu").(string))
	for _, field := range []string{"used_cpu_sys", "used_cpu_user"} {
		seconds, err := strconv.ParseFloat(info[field], 64)
		if err != nil {
			tb.Fatalf("INFO cpu: %v", err)
		}
		used += time.Duration(seconds * float64(time.Second))
	}
	return used
}

// WaitUp waits until the server answers PING, as after Cont or after a Restart on another
// goroutine.
func (s *Server) WaitUp(tb testing.TB) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if !poll(ctx, func() bool { _, err := s.answeringPid(ctx); return err == nil }) {
		tb.Fatalf("redis-server %s does not answer after %v", s.Addr(), startTimeout)
	}
}

// answeringPid pings the one that serves the port and returns its process id.
func (s *Server) answeringPid(ctx context.Context) (pid int, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	err = s.admin(ctx, func(c *redis.Client) error {
		if err := c.Ping(ctx).Err(); err != nil { // fails while data is being loaded; INFO does not
			return err
		}
		info, err := c.Info(ctx, "server").Result()
		if err != nil {
			return err
		}
		if pid, err = strconv.Atoi(infoFields(info)["process_id"]); err != nil {
			return fmt.Errorf("redistest: no process_id in INFO: %w", err)
		}
		return nil
	})
	return pid, err
}

// infoFields takes the "name:value" lines of an INFO or CLUSTER INFO reply apart.
func infoFields(info string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	return fields
}
