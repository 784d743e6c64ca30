package redistest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// Replace puts a new server in the place of a master, for good: the new one becomes its replica, takes over
// when it has all that the master has, and the old one is killed and forgotten by all others. No
// acknowledged write is lost. The new server has the old one's place in Servers; it has the args that the
// Cluster was launched with.
func (c *Cluster) Replace(ctx context.Context, i int) error {
	old := c.servers[i]
	s, err := Launch(c.args...)
	if err != nil {
		return err
	}
	if c.attach != nil {
		c.attach(s)
	}
	c.extra = append(c.extra, s) // for Close, whatever happens
	id, err := s.command(ctx, "CLUSTER", "MYID")
	if err != nil {
		return err
	}
	if err := c.replicate(ctx, s, i); err != nil {
		return err
	}
	if _, err := s.command(ctx, "CLUSTER", "FAILOVER"); err != nil {
		return err
	}
	if err := c.until(ctx, s, "it is a master", func() bool {
		role, err := s.command(ctx, "ROLE")
		return err == nil && role.([]any)[0] == "master"
	}); err != nil {
		return err
	}
	others := append(slices.Delete(slices.Clone(c.servers), i, i+1), s)
	for _, other := range others {
		if err := c.until(ctx, other, "it knows the new master",
			func() bool { return knows(ctx, other, id.(string)+" ", "master") }); err != nil {
			return err
		}
	}
	if err := old.Kill(); err != nil {
		return err
	}
	for _, other := range others {
		if _, err := other.command(ctx, "CLUSTER", "FORGET", c.ids[i]); err != nil {
			return err
		}
	}
	c.servers[i], c.ids[i] = s, id.(string)
	c.extra = append(slices.DeleteFunc(c.extra, func(e *Server) bool { return e == s }), old)
	return nil
}

// replicate makes s a replica of master i that is in step with it, and of which all masters know.
func (c *Cluster) replicate(ctx context.Context, s *Server, i int) error {
	master := c.servers[i]
	if _, err := master.command(ctx, "CONFIG", "SET", "repl-diskless-sync-delay", 0); err != nil {
		return err // it would wait for more replicas
	}
	for _, other := range c.servers {
		if _, err := s.command(ctx, "CLUSTER", "MEET", "127.0.0.1", other.Port()); err != nil {
			return err
		}
	}
	if err := c.until(ctx, s, "it knows all masters", func() bool {
		return !slices.ContainsFunc(c.ids, func(id string) bool { return !knows(ctx, s, id+" ", " connected") })
	}); err != nil {
		return err
	}
	if _, err := s.command(ctx, "CLUSTER", "REPLICATE", c.ids[i]); err != nil {
		return err
	}
	for _, other := range c.servers {
		if err := c.until(ctx, other, "it knows the replica",
			func() bool { return knows(ctx, other, "slave "+c.ids[i], fmt.Sprintf(":%d@", s.Port())) }); err != nil {
			return err
		}
	}
	return c.until(ctx, s, "it has what the master has", func() bool {
		info, err := s.command(ctx, "INFO", "replication")
		return err == nil && strings.Contains(info.(string), "master_link_status:up")
	})
}

// knows reports whether a line of what s knows of the Cluster's nodes has all these texts.
func knows(ctx context.Context, s *Server, texts ...string) bool {
	nodes, err := s.command(ctx, "CLUSTER", "NODES")
	if err != nil {
		return false
	}
	return slices.ContainsFunc(strings.Split(nodes.(string), "\n"), func(line string) bool {
		return !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) })
	})
}

// until waits until cond holds of s.
func (c *Cluster) until(ctx context.Context, s *Server, what string, cond func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if !poll(ctx, cond) {
		return fmt.Errorf("redistest: cluster node %s: waited in vain until %s; its log:\n%s", s.Addr(), what,
			s.Log())
	}
	return nil
}

// MustReplace is Replace in a test.
func (c *Cluster) MustReplace(tb testing.TB, i int) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*startTimeout+time.Second)
	defer cancel()
	if err := c.Replace(ctx, i); err != nil {
		tb.Fatal(err)
	}
}
