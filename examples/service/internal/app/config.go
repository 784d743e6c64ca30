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

// Config is what differs between one process, one deployment and another. What does not stands where it is used.
type Config struct {
	Addr  string // to listen on
	Name  string // of this process, in the log and in the database
	DB    string // file of the SQLite database
	With  string // one of variant.Names
	Redis string // urls of the nodes that lock, with commas between them
	Cache string // url of the cache

	Origin      string // base url of the origin
	OriginToken string // this process's credentials there

	Prefix  string        // of all keys in Redis
	Fresh   time.Duration // how long a value of the cache is good
	Timeout time.Duration // of a request
	Ready   time.Duration // how long a start waits for the locks
	Drain   time.Duration // how long requests are still taken after /healthz has said that no more should come
	Grace   time.Duration // how long a shutdown may take after that

	Accounts int // how many the bank is to have, a0 and so on, with money on them

	Admin bool // serve /admin
	Spin  int  // goroutines per processor that only burn it: for the demo
}

// Flags defines a flag for each field.
func Flags(fs *flag.FlagSet) *Config {
	c := &Config{}
	fs.StringVar(&c.Addr, "addr", "127.0.0.1:8080", "address to listen on")
	fs.StringVar(&c.Name, "name", "p1", "name of this process")
	fs.StringVar(&c.DB, "db", "bank.db", "file of the SQLite database")
	fs.StringVar(&c.With, "with", variant.Flightlock, "what excludes: "+strings.Join(variant.Names, ", "))
	fs.StringVar(&c.Redis, "redis", "redis://127.0.0.1:6379", "urls of the nodes that lock, with commas between them")
	fs.StringVar(&c.Cache, "cache", "redis://127.0.0.1:6379", "url of the cache")
	fs.StringVar(&c.Origin, "origin", "http://127.0.0.1:9090", "base url of the origin")
	fs.StringVar(&c.OriginToken, "origin-token", "", "credentials at the origin")
	fs.StringVar(&c.Prefix, "prefix", "", "of all keys in Redis")
	fs.DurationVar(&c.Fresh, "fresh", 10*time.Second, "how long a value of the cache is good")
	fs.DurationVar(&c.Timeout, "timeout", 10*time.Second, "of a request")
	fs.DurationVar(&c.Ready, "ready", 5*time.Second, "how long a start waits until locks can be had; then the process is ready without")
	fs.DurationVar(&c.Drain, "drain", 500*time.Millisecond, "how long requests are taken after /healthz has said no: longer than the load balancer takes to notice")
	fs.DurationVar(&c.Grace, "grace", 10*time.Second, "how long a shutdown may take after that")
	fs.IntVar(&c.Accounts, "accounts", 20, "how many the bank is to have: a0, a1 and so on, with money on them")
	fs.BoolVar(&c.Admin, "admin", false, "serve /admin")
	fs.IntVar(&c.Spin, "spin", 0, "goroutines per processor that only burn it")
	return c
}

func (c Config) validate() error {
	switch {
	case !slices.Contains(variant.Names, c.With):
		return fmt.Errorf("-with %q: want one of %s", c.With, strings.Join(variant.Names, ", "))
	case c.Fresh < time.Second:
		return errors.New("-fresh: it must be a second or more")
	case c.Timeout <= 0 || c.Grace <= 0 || c.Ready <= 0 || c.Drain < 0 || c.Spin < 0 || c.Spin > maxSpin || c.Accounts < 0:
		return errors.New("-timeout, -grace and -ready must be above 0, -drain, -spin and -accounts not below, -spin not above 64")
	}
	return nil
}
