package node

import (
	"context"
	"errors"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/lua"
	"github.com/redis/go-redis/v9"
)

// setsKey is where clients leave word of the set of nodes that they lock on. A Cluster is
// one node, so it has one.
const setsKey = Reserved + "sets}"

// LeaveWord tells a node of the set of nodes that the caller locks on, for so long, and
// returns all sets that it knows of, as lua/sets.lua has them.
func LeaveWord(ctx context.Context, client redis.UniversalClient, name, text string, good time.Duration) (string, error) {
	c, err := serverOf(ctx, client, setsKey)
	if err != nil {
		return "", err
	}
	call := func() (string, error) {
		return c.EvalSha(ctx, lua.Sets.SHA, []string{setsKey}, name, text, good.Milliseconds()).Text()
	}
	all, err := call()
	if conn.HasCode(err, "NOSCRIPT") {
		if err := c.ScriptLoad(ctx, lua.Sets.Source).Err(); err != nil {
			return "", err
		}
		return call()
	}
	return all, err
}

// Word is what clients have left on a node, without leaving any.
func Word(ctx context.Context, client redis.UniversalClient) (string, error) {
	c, err := serverOf(ctx, client, setsKey)
	if err != nil {
		return "", err
	}
	all, err := c.Get(ctx, setsKey).Result()
	if errors.Is(err, redis.Nil) {
		return "", nil
	}
	return all, err
}

// serverOf is the server that has key, with timeouts of our own.
func serverOf(ctx context.Context, client redis.UniversalClient, key string) (*redis.Client, error) {
	if cluster, ok := client.(*redis.ClusterClient); ok {
		c, err := cluster.MasterForKey(ctx, key)
		if err != nil {
			return nil, err
		}
		return conn.WithTimeout(c, stepTime), nil
	}
	return conn.WithTimeout(client.(*redis.Client), stepTime), nil
}

// Brief is client with timeouts of our own, as far as go-redis has that.
func Brief(client redis.UniversalClient) redis.UniversalClient {
	if c, ok := client.(*redis.Client); ok {
		return conn.WithTimeout(c, stepTime)
	}
	return client
}
