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

// Ready makes the links of the node's servers, so that the first requests do not wait for that, and says why
// not if that cannot be. A server whose scripts may not access keys of two hash slots, as was found before,
// is asked for that again. It ends when all servers were tried once, or with ctx.
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
				s.missing.Or(uint32(unguardedOps))
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

// Refused tries the commands of the lock scripts within a script, by lua/check.lua, and returns those that
// the server refuses, with its errors. key and own are names that nobody uses, in one hash slot.
func Refused(ctx context.Context, c redis.Cmdable, key, own string) (map[string]error, error) {
	got, err := Eval(ctx, c, lua.Check, []string{key, own})
	if err != nil {
		return nil, err
	}
	failed, _ := got.([]any)
	refused := map[string]error{}
	for i := 0; i+1 < len(failed); i += 2 {
		refused[fmt.Sprint(failed[i])] = conn.ServerError(fmt.Sprint(failed[i+1]))
	}
	return refused, nil
}

// Eval executes a script as requests do: by its name, which is loaded if need be, or as a text where that
// cannot be. If neither can be, the error has the reasons for both.
func Eval(ctx context.Context, c redis.Cmdable, script lua.Script, keys []string, args ...any) (any, error) {
	why := error(nil)
	for range 2 {
		got, err := c.EvalSha(ctx, script.SHA, keys, args...).Result()
		if err == nil {
			return got, nil
		}
		if why = fmt.Errorf("EVALSHA: %w", err); !isUnknown(err) {
			return nil, why
		}
		if err := c.ScriptLoad(ctx, script.Source).Err(); err != nil {
			if why = fmt.Errorf("SCRIPT LOAD: %w", err); !isOfLoads(err) {
				return nil, why
			}
			break
		}
	}
	got, err := c.Eval(ctx, script.Source, keys, args...).Result()
	if conn.RefusesCommand(err, "eval") {
		err = fmt.Errorf("%w; and the script as a text: %w", why, err)
	}
	return got, err
}

// TryScripts acquires, refreshes and releases key by the lock scripts of a server without an epoch. bucket is
// used as the fence bucket, and deleted. Both are of one hash slot, and nobody else uses them, nor owner.
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
		{"release", lua.Release, []string{key, bucket, key, wants, offers},
			[]any{"", 0, "", owner, "PUBLISH", 1, ""}},
	} {
		if _, err := Eval(ctx, c, step.script, step.keys, step.args...); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// TrySlots returns the error by which a server refuses scripts that access keys of two hash slots, and why it
// could not be asked.
func TrySlots(ctx context.Context, c redis.Cmdable) (refused, err error) {
	got, err := Eval(ctx, c, lua.Slots, triedKeys(0))
	text, _ := got.(string)
	if refused = apart(text, err); refused != nil || conn.IsReply(err) {
		err = nil
	}
	return refused, err
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
