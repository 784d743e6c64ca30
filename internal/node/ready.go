package node

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// Ready makes the links of the node's servers, so that the first requests do not wait for that, and says why not if
// that cannot be. A server whose scripts may access only the keys that they declare, as was found before, is asked
// for that again. It ends when all servers were tried once, or with ctx. An Unfit server is the only error that does
// not pass by itself.
func (n *Node) Ready(ctx context.Context) error {
	all, err := n.allServers(ctx)
	if err != nil {
		return err
	}
	if !n.begin() {
		return ErrClosed
	}
	done := make(chan error, 1)
	go func() { // ends with the links' dials
		defer n.wg.Done()
		limited, cancel := context.WithTimeout(n.life, n.ExchangeTime())
		defer cancel()
		errs := make([]error, len(all))
		var tries sync.WaitGroup
		for i, s := range all {
			if n.guard == nil && s.link.Session() == nil {
				s.reload.Store(true)
			}
			tries.Go(func() { errs[i] = s.open(limited) })
		}
		tries.Wait()
		if n.Undeclared() != nil {
			n.Boot("", func(Epoch, error) {})
		}
		errs = append(errs, n.findUnfit())
		done <- errors.Join(errs...)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Unfit is the error of a server that lacks something without which locks do not work as they should.
type Unfit struct {
	Addr, Version string // Version as the server reports it; may be ""
	Err           error  // what was refused
}

func (e *Unfit) Error() string {
	return fmt.Sprintf("node %s (version %s) is too old: Redis 6.2 or Valkey 7.2 is the least; install one of these "+
		"or a later one: %v", e.Addr, cmp.Or(e.Version, "not reported"), e.Err)
}

func (e *Unfit) Unwrap() error { return e.Err }

// findUnfit tries what the lock scripts would do without in silence: a server without ZADD LT grants locks, and
// registers nobody who waits. A server that cannot be asked is not unfit.
func (n *Node) findUnfit() error {
	ctx, cancel := context.WithTimeout(n.life, n.ExchangeTime())
	defer cancel()
	tried := map[*Server]bool{}
	var errs []error
	for _, tag := range SpreadTags() {
		key := Reserved + tag + "}:check:" + rand.Text()
		s, err := n.ServerOf(ctx, key, "")
		if err != nil || tried[s] {
			continue
		}
		tried[s] = true
		if err := s.findUnfit(ctx, key); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (s *Server) findUnfit(ctx context.Context, key string) error {
	if s.Suspended() {
		return nil
	}
	c, err := conn.DialOnce(ctx, s.from, s.n.timeout, s.singleDials, func(error) {}, func(*redis.Options) {})
	if err != nil {
		return nil
	}
	defer c.Close()
	refused, err := Refused(ctx, c, key, key+":own")
	if why, has := refused["ZADD"]; err == nil && has && !conn.NoRights(why) {
		hello, _ := c.Do(ctx, "HELLO").Result()
		return &Unfit{Addr: s.n.name, Version: versionOf(hello), Err: fmt.Errorf("ZADD LT: %w", why)}
	}
	return nil
}

// versionOf reads the reply of HELLO.
func versionOf(hello any) string {
	switch v := hello.(type) {
	case map[any]any:
		version, _ := v["version"].(string)
		return version
	case []any:
		if i := slices.Index(v, any("version")); i >= 0 && i+1 < len(v) {
			return fmt.Sprint(v[i+1])
		}
	}
	return ""
}

// Refused tries the commands of the lock scripts within a script, by lua/check.lua, and returns those that the
// server refuses, with its errors. key and own are names that nobody uses, in one hash slot.
func Refused(ctx context.Context, c redis.Cmdable, key, own string) (map[string]error, error) {
	if err := c.ScriptLoad(ctx, lua.Check.Source).Err(); err != nil {
		return nil, fmt.Errorf("SCRIPT LOAD: %w", err)
	}
	failed, err := c.EvalSha(ctx, lua.Check.SHA, []string{key, own}).StringSlice()
	if err != nil {
		return nil, fmt.Errorf("EVALSHA: %w", err)
	}
	refused := map[string]error{}
	for i := 0; i+1 < len(failed); i += 2 {
		refused[failed[i]] = conn.ServerError(failed[i+1])
	}
	return refused, nil
}

// TryScripts acquires, refreshes and releases key by the lock scripts of a server without an epoch, which
// access only the keys that they declare. bucket is used as the fence bucket, and deleted. Both are of one
// hash slot, and nobody else uses them, nor owner.
func TryScripts(ctx context.Context, c redis.Cmdable, key, bucket, owner string) error {
	defer c.Del(context.WithoutCancel(ctx), bucket)
	wants := bucket + ":wants"
	for _, step := range []struct {
		name   string
		script lua.Script
		keys   []string
		args   []any
	}{
		{"acquire", lua.Acquire, []string{key, bucket}, []any{owner, 1000, 1}},
		{"refresh", lua.Refresh, []string{key, bucket}, []any{owner, 1000, 1, 0}},
		{"release", lua.Release, []string{key, wants}, []any{owner, "PUBLISH", 1, ""}},
	} {
		err := c.ScriptLoad(ctx, step.script.Source).Err()
		if err == nil {
			err = c.EvalSha(ctx, step.script.SHA, step.keys, step.args...).Err()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// TryUndeclared returns the error by which a server refuses scripts that access a key that they do not declare,
// and why it could not be asked.
func TryUndeclared(ctx context.Context, c redis.Cmdable) (refused, err error) {
	pipe := c.Pipeline()
	loaded := pipe.ScriptLoad(ctx, lua.Undeclared.Source)
	var tries []*redis.Cmd
	for _, key := range undeclaredKeys(spreadSlots[:]) {
		tries = append(tries, pipe.EvalSha(ctx, lua.Undeclared.SHA, []string{key}))
	}
	_, err = pipe.Exec(ctx)
	if conn.IsReply(err) {
		err = loaded.Err()
	}
	for _, try := range tries {
		text, _ := try.Val().(string)
		if refused = undeclared(text, try.Err()); refused != nil {
			return refused, err
		}
	}
	return nil, err
}

// allServers are those that may be asked: of a Cluster all masters.
func (n *Node) allServers(ctx context.Context) ([]*Server, error) {
	ro := n.router
	if ro == nil {
		return []*Server{n.server}, nil
	}
	masters, err := ro.masters(ctx)
	if err != nil {
		return nil, err
	}
	var all []*Server
	for _, m := range masters {
		all = append(all, ro.server(m))
	}
	return all, nil
}
