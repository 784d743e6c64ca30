package flightlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/group"
	"github.com/redis/go-redis/v9"
)

// Open makes a Client with one node per URL, and connections that Close closes. It sends nothing yet. A bad
// URL is an ErrInvalid that shows it without its password.
//
//	redis://user:password@host:6379/0     a server; rediss:// with TLS
//	unix:///run/redis.sock                a server on a unix socket
//	redis://s1:26379?master_name=m&addr=s2:26379    a Sentinel-managed master
//	redis://c1:6379?addr=c2:6379&addr=c3:6379       a Redis Cluster: one node
//
// In the URL of Sentinels, user and password are those of the Sentinels; the parameters username and password
// are those of the master. Special characters in a password are written %XX. Other parameters are those of
// go-redis' ParseURL, ParseFailoverURL and ParseClusterURL, except those that send reads to replicas.
// Connections are named "flightlock" unless the URL has client_name. See [New] for what a node may be.
func Open(opts Options, urls ...string) (*Client, error) {
	if len(urls) == 0 || len(urls) > maxNodes { // checked before so many clients are made
		return nil, invalid("len(urls)", len(urls),
			fmt.Sprintf("1 to %d are required, one for each node", maxNodes))
	}
	makes := make([]func() redis.UniversalClient, len(urls))
	for i, u := range urls {
		var err error
		if makes[i], err = parseURL(u); err != nil {
			return nil, refusal(i, u)
		}
	}
	var nodes []redis.UniversalClient
	for _, newNode := range makes {
		nodes = append(nodes, newNode())
	}
	c, err := newClient(opts, "urls", nodes)
	if err != nil {
		_ = closeAll(nodes)
		return nil, err
	}
	c.own = nodes
	return c, nil
}

// closeOwn is closeAll, until ctx ends: a client of Sentinels that do not answer is locked during
// its request. Clients that are closed late end by their own timeouts.
func closeOwn(ctx context.Context, nodes []redis.UniversalClient) error {
	if len(nodes) == 0 {
		return nil
	}
	var failed error // read only if closeAll ends in time
	if err := group.For(ctx, func() { failed = closeAll(nodes) }); err != nil {
		return fmt.Errorf("connections: %w", err)
	}
	return failed
}

// closeAll closes all clients at once, so that one that hangs does not keep others open.
func closeAll(nodes []redis.UniversalClient) error {
	return errors.Join(concurrently(len(nodes), func(i int) error { return nodes[i].Close() })...)
}

var errWantURL = errors.New("want redis://host:port, rediss://host:port or unix:///path")

// parseURL returns what makes the client for a URL.
func parseURL(rawURL string) (func() redis.UniversalClient, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, errWantURL
	}
	q := u.Query()
	for name := range q {
		if name == "replica_only" || strings.HasPrefix(name, "route_") || name == "read_only" ||
			name == "use_disconnected_replicas" {
			return nil, fmt.Errorf("parameter %s: a replica cannot vote", name)
		}
	}
	for _, size := range q["pool_size"] {
		if strings.HasPrefix(size, "-") { // go-redis would panic
			return nil, errors.New("parameter pool_size must not be negative")
		}
	}
	switch {
	case u.Scheme == "" || u.Host == "" && u.Path == "":
		return nil, errWantURL
	case strings.Contains(rawURL, "#"): // go-redis would take the rest for nothing
		return nil, errors.New("a # must be written as %23")
	case u.Scheme == "unix" && u.Host != "":
		return nil, errors.New("a unix socket has no host: want unix:///path, with three slashes")
	}
	if err := checkHosts(u, q["addr"]); err != nil {
		return nil, err
	}
	switch {
	case q.Has("master_name"):
		o, err := redis.ParseFailoverURL(rawURL)
		if err != nil {
			return nil, err
		}
		if o.MasterName == "" {
			return nil, errors.New("parameter master_name is empty: " +
				"it must be the master's name in the configuration of the Sentinels")
		}
		tune(&o.ClientName, &o.OnConnect, &o.MaxRetries, &o.DialerRetries, &o.MaxIdleConns, &o.DialTimeout,
			&o.ReadTimeout, &o.ConnMaxIdleTime, &o.ContextTimeoutEnabled,
			&o.PipelinePoolSize, &o.ReadBufferSize, &o.WriteBufferSize)
		return func() redis.UniversalClient {
			c := redis.NewFailoverClient(o)
			// The dialer asks the Sentinels, and nothing else reads the address.
			c.Options().Addr = conn.SentinelAddr + o.MasterName
			return c
		}, nil
	case q.Has("addr"):
		o, err := redis.ParseClusterURL(rawURL)
		if err != nil {
			return nil, err
		}
		tune(&o.ClientName, &o.OnConnect, &o.MaxRetries, &o.DialerRetries, &o.MaxIdleConns, &o.DialTimeout,
			&o.ReadTimeout, &o.ConnMaxIdleTime, &o.ContextTimeoutEnabled,
			&o.PipelinePoolSize, &o.ReadBufferSize, &o.WriteBufferSize)
		return func() redis.UniversalClient { return redis.NewClusterClient(o) }, nil
	}
	o, err := redis.ParseURL(rawURL)
	if err != nil {
		return nil, err
	}
	tune(&o.ClientName, &o.OnConnect, &o.MaxRetries, &o.DialerRetries, &o.MaxIdleConns, &o.DialTimeout,
		&o.ReadTimeout, &o.ConnMaxIdleTime, &o.ContextTimeoutEnabled,
		&o.PipelinePoolSize, &o.ReadBufferSize, &o.WriteBufferSize)
	return func() redis.UniversalClient { return redis.NewClient(o) }, nil
}

// checkHosts reports addresses that go-redis accepts but that cannot be dialled.
func checkHosts(u *url.URL, more []string) error {
	if u.Scheme == "unix" {
		return nil
	}
	for i, addr := range append([]string{u.Host}, more...) {
		if strings.ContainsAny(addr, ", ;") {
			return errors.New("several hosts in one place: use one URL per node; " +
				"further Sentinels or members of the same node follow as ?addr=host:port&addr=host:port")
		}
		at := strings.LastIndexByte(addr, ':')
		if at < 0 || strings.HasSuffix(addr, "]") || i == 0 && addr[at+1:] == "" { // the default port
			continue
		}
		if port, err := strconv.Atoi(addr[at+1:]); err != nil || port < 1 || port > 65535 {
			return errors.New("a port must be a number from 1 to 65535")
		}
	}
	return nil
}

// tune applies the settings that locking needs to the options of any of go-redis' clients.
//
// Pipelines use the same connections as single commands: there are few, for Check and the like. By default
// go-redis would keep connections for pipelines only, with buffers of 128 KiB each way. And if the server
// refuses a login on one of those, go-redis tries one of the others, and the refusal goes unreported.
func tune(name *string, greet *func(context.Context, *redis.Conn) error, retries, dials, idleConns *int,
	dial, read, idle *time.Duration, byContext *bool, pipelinePool, readSize, writeSize *int) {
	*greet, *name = conn.Named(cmp.Or(*name, "flightlock"), nil), ""
	*retries, *dials = -1, 1
	*idleConns, *idle = 0, -1 // keep all of them
	*read, *byContext = max(*read, 2*time.Second), false
	if *dial <= 0 { // to go-redis dial_timeout=0 means -1, with which no dial can succeed
		// for a handshake, and for a first packet that is lost and sent again after a second
		*dial = 2 * time.Second
	}
	*pipelinePool = -1
	*readSize, *writeSize = conn.ReadBuffer, conn.WriteBuffer
}

const hidden = "xxxxx"

var (
	// plainURL matches URLs without room for a password: a scheme, a host, a port and a database at most.
	plainURL = regexp.MustCompile(`^([a-z]+://)?[\w.\-]*(:\d{1,5})?(/\d*)?$`)
	// secretUser is a password and the @ behind it, or what stands in place of both user and password: a
	// password in the wrong place, maybe.
	secretUser = regexp.MustCompile(`^([^/]*//(?:[^:@]*:)?)[^@]*@`)
	// harmless are the parameters whose values are not secret.
	harmless = regexp.MustCompile(`^(addr|db|master_name|username|client_name|protocol|skip_verify|` +
		`[a-z]+(_[a-z]+)*_(timeout|size|conns|dials|time|lifetime|retries|backoff|jitter|fifo|redirects|` +
		`only|enabled|latency|randomly|tolerance|replicas|resp3))=`)
	plainName = regexp.MustCompile(`^[A-Za-z_]+(=|$)`)
)

// withoutPassword is a URL that was refused as it can be shown. If one of its characters was not written as
// %XX, a password may be nearly anywhere in a URL: after a / it is parsed as a path, after & as a parameter's
// name, before ? as a port. So only parts that are known to be harmless are shown.
func withoutPassword(rawURL string) string {
	if plainURL.MatchString(rawURL) {
		return rawURL
	}
	u, err := url.Parse(rawURL)
	if err != nil || u.Opaque != "" || strings.Contains(rawURL, "#") || strings.Count(rawURL, "@") > 1 ||
		u.User == nil && strings.Contains(rawURL, "@") {
		scheme, _, found := strings.Cut(rawURL, "://")
		if !found || !plainURL.MatchString(scheme) {
			return hidden
		}
		return scheme + "://" + hidden
	}
	shown, query, _ := strings.Cut(secretUser.ReplaceAllString(rawURL, "${1}"+hidden+"@"), "?")
	parts := strings.FieldsFunc(query, func(c rune) bool { return c == '&' })
	secret := false
	for i, part := range parts {
		if !harmless.MatchString(part) {
			name := plainName.FindString(part)
			if secret && name != "password=" && name != "sentinel_password=" {
				name = "" // it may be the rest of the secret before it
			}
			if name != part || strings.HasSuffix(name, "=") { // what follows an empty value may be the value
				parts[i], secret = name+hidden, true
			}
		}
	}
	if len(parts) > 0 {
		shown += "?" + strings.Join(parts, "&")
	}
	return shown
}

// refusal is the error for a URL that parseURL refuses. Its reason is why parseURL refuses what is shown of
// the URL, so it cannot quote anything that is hidden.
func refusal(i int, rawURL string) error {
	shown := withoutPassword(rawURL)
	_, why := parseURL(shown)
	if why == nil {
		why = errors.New("a parameter is invalid, or a special character of a user, a password or another value " +
			"is not written as %XX")
	}
	return fmt.Errorf("flightlock: %w: urls[%d] is %q: %s", ErrInvalid, i, shown, why)
}
