package flightlock

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Open makes a Client with connections of its own, one node per url; Close closes them.
//
//	redis://user:password@host:6379/0     a server; rediss:// with TLS
//	unix:///run/redis.sock                a server on a unix socket
//	redis://s1:26379?master_name=m&addr=s2:26379    a Sentinel-managed master
//	redis://c1:6379?addr=c2:6379&addr=c3:6379       a Redis Cluster: one node
//
// In the url of Sentinels, user and password are theirs; those of the master go into the
// parameters username and password.
// Other parameters are those of go-redis' ParseURL, ParseFailoverURL and ParseClusterURL.
// What locking needs is set whatever the url says: no retries (a replayed request can
// overtake the release that undoes it), a read timeout of 2s at least (late answers must
// come back on the connection they were asked on; Options.NodeTimeout bounds the wait), and
// idle connections that are kept, and one try to dial (a node that refuses connections
// should say so at once). Options.Nodes must be empty. A bad url is an ErrInvalid
// that shows it without its password.
func Open(urls []string, opts Options) (*Client, error) {
	if len(opts.Nodes) != 0 {
		return nil, invalid("Options.Nodes", fmt.Sprintf("%d nodes", len(opts.Nodes)), "Open makes the nodes from urls; New takes Nodes")
	}
	for i, u := range urls {
		n, err := dial(u)
		if err != nil {
			closeAll(opts.Nodes)
			return nil, fmt.Errorf("flightlock: %w: urls[%d] is %s: %w", ErrInvalid, i, withoutPassword(u), reason(err))
		}
		opts.Nodes = append(opts.Nodes, n)
	}
	c, err := New(opts)
	if err != nil {
		closeAll(opts.Nodes)
		return nil, err
	}
	c.own = opts.Nodes
	return c, nil
}

func closeAll(nodes []redis.UniversalClient) error {
	var errs []error
	for _, n := range nodes {
		errs = append(errs, n.Close())
	}
	return errors.Join(errs...)
}

// dial makes the client that a url asks for. Nothing is sent yet.
func dial(rawURL string) (redis.UniversalClient, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, fmt.Errorf("%w (want redis://host:port, rediss://host:port or unix:///path)", reason(err))
	}
	q := u.Query()
	for name := range q {
		if name == "replica_only" || strings.HasPrefix(name, "route_") || name == "read_only" {
			return nil, fmt.Errorf("parameter %s: a replica cannot vote", name)
		}
	}
	switch {
	case u.Scheme == "" || u.Host == "" && u.Path == "":
		return nil, errors.New("want redis://host:port, rediss://host:port or unix:///path")
	case q.Has("master_name"):
		o, err := redis.ParseFailoverURL(rawURL)
		if err != nil {
			return nil, err
		}
		o.MaxRetries, o.ReadTimeout, o.ContextTimeoutEnabled = -1, atLeast(o.ReadTimeout), false
		o.ConnMaxIdleTime, o.DialerRetries, o.ClientName = -1, 1, named(o.ClientName)
		return redis.NewFailoverClient(o), nil
	case q.Has("addr"):
		o, err := redis.ParseClusterURL(rawURL)
		if err != nil {
			return nil, err
		}
		o.MaxRetries, o.ReadTimeout, o.ContextTimeoutEnabled = -1, atLeast(o.ReadTimeout), false
		o.ConnMaxIdleTime, o.DialerRetries, o.ClientName = -1, 1, named(o.ClientName)
		return redis.NewClusterClient(o), nil
	}
	o, err := redis.ParseURL(rawURL)
	if err != nil {
		return nil, err
	}
	o.MaxRetries, o.ReadTimeout, o.ContextTimeoutEnabled = -1, atLeast(o.ReadTimeout), false
	o.ConnMaxIdleTime, o.DialerRetries, o.ClientName = -1, 1, named(o.ClientName)
	return redis.NewClient(o), nil
}

// atLeast is the read timeout that locking needs.
func atLeast(d time.Duration) time.Duration { return max(d, 2*time.Second) }

// named is how CLIENT LIST shows our connections.
func named(name string) string {
	if name == "" {
		return "flightlock"
	}
	return name
}

// secrets are what may stand between the user name and the host of a url, and the values
// of parameters that are passwords.
var secrets = []*regexp.Regexp{
	regexp.MustCompile(`^([^/]*//[^/?#]*?:)[^/?#]*(@)`),
	regexp.MustCompile(`(?i)([?&;][^=&;]*password[^=&;]*=)[^&;#]*()`),
}

func withoutPassword(rawURL string) string {
	for _, s := range secrets {
		rawURL = s.ReplaceAllString(rawURL, "${1}xxxxx${2}")
	}
	return fmt.Sprintf("%q", rawURL)
}

// reason is err without the url in its text.
func reason(err error) error {
	var parse *url.Error
	if errors.As(err, &parse) {
		return parse.Err
	}
	return err
}
