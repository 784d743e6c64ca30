package node

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// Ready makes the links of the node's servers, so that the first requests do not wait for that, and says why not if
// that cannot be. A server whose scripts may not access keys of two hash slots, as was found before, is asked for that
// again. It ends when all servers were tried once, or with ctx.
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
		if n.Apart() != nil {
			n.Boot("", func(Epoch, error) {})
		}
		done <- errors.Join(errs...)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
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

// TryScripts acquires, refreshes and releases key by the lock scripts of a server without an epoch. bucket is used
// as the fence bucket, and deleted. Both are of one hash slot, and nobody else uses them, nor owner.
func TryScripts(ctx context.Context, c redis.Cmdable, key, bucket, owner string) error {
	defer c.Del(context.WithoutCancel(ctx), bucket)
	wants, offers := bucket+":wants", bucket+":offers"
	for _, step := range []struct {
		name   string
		script lua.Script
		keys   []string
		args   []any
	}{
		{"acquire", lua.Acquire, []string{key, bucket, key}, []any{"", 0, "", owner, 1000, 1}},
		{"refresh", lua.Refresh, []string{key, bucket}, []any{owner, 1000, 1, 0}},
		{"release", lua.Release, []string{key, bucket, key, wants, offers}, []any{"", 0, "", owner, "PUBLISH", 1, ""}},
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

// TrySlots returns the error by which a server refuses scripts that access keys of two hash slots, and why it could not
// be asked.
func TrySlots(ctx context.Context, c redis.Cmdable) (refused, err error) {
	pipe := c.Pipeline()
	loaded := pipe.ScriptLoad(ctx, lua.Slots.Source)
	var tries []*redis.Cmd
	for _, key := range triedKeys(spreadSlots[:]) {
		tries = append(tries, pipe.EvalSha(ctx, lua.Slots.SHA, []string{key, lua.Marker}))
	}
	_, err = pipe.Exec(ctx)
	if conn.IsReply(err) {
		err = loaded.Err()
	}
	for _, try := range tries {
		text, _ := try.Val().(string)
		if refused = apart(text, try.Err()); refused != nil {
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
