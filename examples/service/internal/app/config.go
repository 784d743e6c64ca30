package app

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
)

// Config is what differs between processes and deployments. What does not is a constant where it
// is used.
type Config struct {
	Addr  string // to listen on
	Name  string // of this process, in the log and the database
	DB    string // file of the SQLite database
	With  string // one of variant.Names
	Redis string // urls of the lock nodes, separated by commas
	Cache string // url of the cache

	NodeTimeout time.Duration // how long a lock node may take to answer; 0: the default of flightlock

	Origin      string // base url of the origin
	OriginToken string // credentials of this process there

	Prefix  string        // of all keys in Redis
	Fresh   time.Duration // how long a cached value is served
	Timeout time.Duration // of a request

	Ready time.Duration // how long a start waits until locks can be had
	Drain time.Duration // how long requests are accepted after /healthz has failed
	Grace time.Duration // how long the rest of a shutdown may take

	Accounts int  // number of the bank's accounts
	Admin    bool // serve /admin, which the demo uses
	Spin     int  // goroutines per processor that keep it busy, for the demo
}

// Flags defines a flag for each field. Parsing fs fills in the Config.
func Flags(fs *flag.FlagSet) *Config {
	c := &Config{}
	fs.StringVar(&c.Addr, "addr", "127.0.0.1:8080", "`address` to listen on")
	fs.StringVar(&c.Name, "name", "p1", "`name` of this process")
	fs.StringVar(&c.DB, "db", "bank.db", "`file` of the SQLite database")
	fs.StringVar(&c.With, "with", variant.Flightlock, "one of "+strings.Join(variant.Names, ", "))
	fs.StringVar(&c.Redis, "redis", "redis://127.0.0.1:6379", "`urls` of the lock nodes, separated by commas")
	fs.StringVar(&c.Cache, "cache", "redis://127.0.0.1:6379", "`url` of the cache")
	fs.DurationVar(&c.NodeTimeout, "node-timeout", 0,
		"how long a lock node may take to answer; 0 is the default of flightlock")
	fs.StringVar(&c.Origin, "origin", "http://127.0.0.1:9090", "base `url` of the origin")
	fs.StringVar(&c.OriginToken, "origin-token", "", "credentials at the origin")
	fs.StringVar(&c.Prefix, "prefix", "", "of all keys in Redis")
	fs.DurationVar(&c.Fresh, "fresh", 10*time.Second, "how long a cached value is served")
	fs.DurationVar(&c.Timeout, "timeout", 10*time.Second, "of a request")
	fs.DurationVar(&c.Ready, "ready", 5*time.Second,
		"how long a start waits until locks can be had; then it goes on without")
	fs.DurationVar(&c.Drain, "drain", 500*time.Millisecond,
		"how long requests are accepted after /healthz has failed: longer than the load balancer takes to notice")
	fs.DurationVar(&c.Grace, "grace", 15*time.Second,
		"how long the rest of a shutdown may take: longer than the last request, which may take -timeout")
	fs.IntVar(&c.Accounts, "accounts", 20,
		"`number` of the bank's accounts: a0, a1 and so on, each with a million")
	fs.BoolVar(&c.Admin, "admin", false, "serve /admin, without any protection: for the demo")
	fs.IntVar(&c.Spin, "spin", 0, "goroutines per processor that keep it busy: for the demo")
	return c
}

func (c Config) validate() error {
	switch {
	case !slices.Contains(variant.Names, c.With):
		return fmt.Errorf("-with %q: want one of %s", c.With, strings.Join(variant.Names, ", "))
	case c.Fresh < time.Second:
		return errors.New("-fresh: it must be a second or more")
	case c.Timeout <= 0 || c.Ready <= 0 || c.Grace <= 0:
		return errors.New("-timeout, -ready and -grace must be above 0")
	case c.Grace <= c.Timeout:
		return fmt.Errorf("-grace %v: it must be longer than -timeout (%v), which the last requests may take",
			c.Grace, c.Timeout)
	case c.Drain < 0 || c.Accounts < 0:
		return errors.New("-drain and -accounts must not be below 0")
	case c.Spin < 0 || c.Spin > maxSpin:
		return fmt.Errorf("-spin: it must be from 0 to %d", maxSpin)
	}
	return nil
}
