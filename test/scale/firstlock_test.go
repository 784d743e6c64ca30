package scale

import (
	"crypto/tls"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/flightlock/flightlock/internal/testkit/lockkit"
	"github.com/redis/go-redis/v9"
)

// The first lock and the first Get of a Client succeed although nothing has been dialed: each of the several
// steps of reaching a node has its own deadline, and all of them take longer than that. In virtual time a
// step takes nearly all of its time; a busy machine needs some of it.
func TestFirstLockOverALongWay(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3} {
		for _, share := range []int{40, 80, 99} {
			for name, first := range firsts {
				t.Run(fmt.Sprintf("virtual time/nodes=%d/roundtrip=%d%%/%s", n, share, name), func(t *testing.T) {
					bubble(t, n, nodeTimeout*time.Duration(share)/100,
						func(t *testing.T, _ []*redistest.MemNode, c *flightlock.Client) {
							began := time.Now()
							testkit.Must(t, first(t, c, "k"))
							if took := time.Since(began); took < nodeTimeout && share > 40 {
								t.Errorf("it took %v: less than the steps together", took)
							}
						})
				})
			}
		}
	}
	opts := flightlock.Options{NodeTimeout: 5 * nodeTimeout}
	for _, tc := range []struct {
		name          string
		args          []string
		user, options string
		tls           bool
	}{
		{name: "plain"},
		{name: "password", args: []string{"--requirepass", "hunter2"}, user: ":hunter2@"},
		{name: "TLS", user: ":hunter2@", args: []string{"--requirepass", "hunter2"}, options: "?skip_verify=true",
			tls: true},
	} {
		for _, n := range []int{1, 3} {
			for _, share := range []int{40, 80} {
				if !redistest.Long() && (share == 80 || (n == 3) != (tc.name == "plain") || tc.name == "password") {
					continue
				}
				t.Run(fmt.Sprintf("%s/nodes=%d/roundtrip=%d%%", tc.name, n, share), func(t *testing.T) {
					t.Parallel()
					var urls []string
					for range n {
						args, addr := tc.args, ""
						if tc.tls {
							_, cert, key := redistest.Certificates(t)
							addr = redistest.RefusedAddr(t)
							_, port, _ := net.SplitHostPort(addr)
							args = append(args[:len(args):len(args)], "--tls-port", port,
								"--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients", "no")
						}
						s := redistest.StartServer(t, args...)
						if addr == "" {
							addr = s.Addr()
						}
						p := redistest.StartProxy(t, addr)
						p.SetDelay(opts.NodeTimeout * time.Duration(share) / 100)
						scheme := "redis://"
						if tc.tls {
							scheme = "rediss://"
						}
						urls = append(urls, scheme+tc.user+p.Addr()+tc.options)
					}
					run, wait := testkit.Together(t)
					defer wait()
					for by, first := range firsts {
						for _, open := range []bool{false, true} {
							if !redistest.Long() && by == "Get" && n == 3 {
								continue
							}
							run(madeBy(open)+"/"+by, func(t *testing.T) {
								for tries := range 20 { // if the steps shared one deadline, none would succeed
									var c *flightlock.Client
									if open {
										c = lockkit.Open(t, opts, urls...)
									} else {
										c = lockkit.New(t, opts, parsed(t, urls)...)
									}
									began := time.Now()
									err := first(t, c, fmt.Sprint(by, open, tries))
									t.Logf("after %v: %v", time.Since(began), err)
									if err == nil {
										return
									}
								}
								t.Error("no first lock")
							})
						}
					}
				})
			}
		}
	}
}

// firsts are the ways to use a Client first.
var firsts = map[string]func(t *testing.T, c *flightlock.Client, key string) error{
	"TryLock": firstTryLock, "Get": firstGet,
}

func firstTryLock(t *testing.T, c *flightlock.Client, key string) error {
	l, err := c.TryLock(t.Context(), key, time.Minute)
	if err == nil {
		_ = l.Release(t.Context()) // or it is owed
	}
	return err
}

func firstGet(t *testing.T, c *flightlock.Client, key string) error {
	s := &service{c: c}
	s.work.Store(&workload{})
	f, err := s.fetcher(c, fetch.Options{})
	testkit.Must(t, err)
	defer f.Close(t.Context())
	s.f = f
	_, err = f.Get(t.Context(), key)
	if st := f.Stats(); err == nil && st.UnlockedLoads > 0 {
		err = fmt.Errorf("%+v", st)
	}
	return err
}

// parsed makes clients with default options of urls.
func parsed(t *testing.T, urls []string) (nodes []redis.UniversalClient) {
	t.Helper()
	for _, u := range urls {
		o, err := redis.ParseURL(u)
		testkit.Must(t, err)
		if o.TLSConfig != nil {
			o.TLSConfig = &tls.Config{InsecureSkipVerify: true} // of a test
		}
		c := redis.NewClient(o)
		t.Cleanup(func() { c.Close() })
		nodes = append(nodes, c)
	}
	return nodes
}
