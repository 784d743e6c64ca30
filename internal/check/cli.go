package check

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/flightlock/flightlock/internal/conn"
	"github.com/flightlock/flightlock/internal/errtext"
	"github.com/redis/go-redis/v9"
)

// command builds redis-cli commands for a server, with the options of the client except its
// password, for which redis-cli prompts.
type command struct {
	addr     string
	tls      *tls.Config // nil: without TLS
	user     string      // "" is the default user
	password bool
}

// command returns redis-cli for a server of the i-th node.
func (c *Config) command(i int, addr string) command {
	switch n := c.Clients[i].(type) {
	case *redis.Client:
		o := n.Options()
		return command{addr, o.TLSConfig, o.Username, o.Password != "" || o.CredentialsProvider != nil ||
			o.CredentialsProviderContext != nil || o.StreamingCredentialsProvider != nil}
	case *redis.ClusterClient:
		o := n.Options()
		return command{addr, o.TLSConfig, o.Username, o.Password != "" || o.CredentialsProvider != nil ||
			o.CredentialsProviderContext != nil || o.StreamingCredentialsProvider != nil}
	}
	return command{addr: addr}
}

// FixLogin returns what to do if the node of that name refuses the login with err.
func (c *Config) FixLogin(name string, err error) string {
	for i, n := range c.Nodes {
		if n.Name() == name {
			return doesNotServe(c.command(i, name), err).Fix
		}
	}
	return doesNotServe(command{addr: name}, err).Fix
}

// admin returns c for a privileged user, whose name is unknown if clients have user names.
func (c command) admin() command {
	if c.user != "" {
		c.user = "ADMIN"
	}
	return c
}

func (c command) String() string {
	var b strings.Builder
	if host, port, err := net.SplitHostPort(c.addr); err == nil && !strings.Contains(host, " ") {
		fmt.Fprintf(&b, "redis-cli -h %s -p %s", host, port)
	} else if strings.HasPrefix(c.addr, "/") {
		b.WriteString("redis-cli -s " + quoted(c.addr))
	} else if strings.HasPrefix(c.addr, "cluster[") {
		b.WriteString("on each of its servers: redis-cli")
	} else {
		b.WriteString("on that server: redis-cli")
	}
	if c.tls != nil {
		b.WriteString(" --tls")
		if c.tls.InsecureSkipVerify {
			b.WriteString(" --insecure")
		} else if c.tls.RootCAs != nil {
			b.WriteString(" --cacert FILE")
		}
		if len(c.tls.Certificates) > 0 || c.tls.GetClientCertificate != nil {
			b.WriteString(" --cert FILE --key FILE")
		}
	}
	if c.user != "" {
		b.WriteString(" --user " + quoted(c.user))
	}
	if c.user != "" || c.password {
		b.WriteString(" --askpass")
	}
	return b.String()
}

// quoted returns a word quoted for a shell.
func quoted(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

var plainWord = regexp.MustCompile(`^[\w.@%+:/-]+$`)

// unreachable returns the only finding for a server that cannot be reached or refuses logins.
func unreachable(cli command, err error) Finding {
	f := doesNotServe(cli, err)
	f.Node, f.Check, f.Why = cli.addr, rules[0].name, rules[0].why
	return f
}

// doesNotServe returns the finding for a server that cannot be reached, or refuses logins.
func doesNotServe(cli command, err error) Finding {
	f := Finding{Status: Fail, Found: errtext.OneLine(err)}
	unknown, noMaster := conn.NoMaster(err)
	switch text := f.Found; {
	case noMaster && unknown:
		f.Found = "the Sentinels know no such master: " + text
		f.Fix = "name it as they do, in the url's master_name or in FailoverOptions.MasterName; " +
			"on a Sentinel: redis-cli -p 26379 SENTINEL MASTERS"
	case noMaster && containsAny(text, "NOPERM", "NOAUTH", "WRONGPASS"):
		f.Fix = "give this client a user and password that the Sentinels accept: those of the url, or " +
			"FailoverOptions.SentinelUsername and SentinelPassword; and give that user the rights that " +
			"docs/operations.md lists for Sentinels; on each of them: redis-cli -p 26379 ACL LIST"
	case noMaster:
		f.Fix = "start the Sentinels, or correct their addresses; " +
			"this should list the master: redis-cli -h SENTINEL -p 26379 SENTINEL MASTERS"
	case cli.fix(text) != "":
		f.Fix = cli.fix(text)
	case strings.Contains(text, "tls: "), strings.Contains(text, "x509: "):
		f.Fix = fixTLS(cli, err)
	case cli.tls == nil && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)):
		cli.tls = &tls.Config{}
		f.Fix = fmt.Sprintf("it accepts and closes the connection: if it expects TLS, use rediss:// for Open, "+
			"a TLSConfig for New; then this should answer PONG: %s PING; "+
			"a proxy that does not know HELLO, such as twemproxy, cannot be used", cli)
	case errors.Is(err, conn.ErrLogin), conn.IsReply(err):
		f.Fix = fmt.Sprintf("fix what the answer reports; the server may not be Redis. This should answer PONG: "+
			"%s PING", cli)
	default:
		f.Fix = fmt.Sprintf("start the server, or correct the address; this should answer PONG: %s PING", cli)
		if cli.tls != nil {
			f.Fix += "; if the server has no TLS on that port, use redis://, and a client without TLSConfig for New"
		}
	}
	return f
}

// fixes are what to do about what a server says: the first that has a word of it counts. Words in lower case
// are compared in lower case. CLI is redis-cli for a privileged user.
var fixes = []struct {
	words []string
	fix   string
}{
	{[]string{"WRONGPASS", "NOAUTH", "ERR AUTH "},
		"give this client the right user and password; CLI ACL LIST shows the users"},
	{[]string{"DB index is out of range"},
		"use a database number that the server has, the same one for all nodes; " +
			"this shows how many it has: CLI CONFIG GET databases"},
	{[]string{"max number of clients"},
		"raise maxclients, or close connections of clients that have too many: " +
			"CLI CLIENT LIST, on a connection that is open already"},
	{[]string{"DENIED "}, "its protected mode refuses other machines: give its users passwords, and then, " +
		"on that machine: CLI CONFIG SET protected-mode no"},
	{[]string{"LOADING"}, "wait until it has loaded its data: CLI INFO persistence"},
	{[]string{"BUSY"},
		"somebody's script runs for too long; this ends it, unless it has written: CLI SCRIPT KILL"},
	{[]string{"NOREPLICAS"}, "CLI INFO replication (bring its replicas back, or lower min-replicas-to-write)"},
	{[]string{"OOM"}, "CLI INFO memory (free memory, or raise maxmemory: CONFIG SET maxmemory BYTES)"},
	{[]string{"MISCONF"}, "CLI INFO persistence (it cannot save: repair its disk)"},
	{[]string{"READONLY"}, "CLI ROLE (it is a replica: use its master, or make it one)"},
	{[]string{"crossslot", "non local key", "hash to the same slot", "noscript", "moved "}, FixApart},
	{[]string{"unknown redis command", "unknown command", "syntax error"},
		"install Redis 6.0, Valkey 7.2 or later, without rename-command for what the lock scripts call"},
}

// fix returns what to do about a server that says that; "" if it is in none of fixes.
func (c command) fix(text string) string {
	for _, f := range fixes {
		if containsAny(text, f.words...) || containsAny(strings.ToLower(text), f.words...) {
			return strings.ReplaceAll(f.fix, "CLI", c.admin().String())
		}
	}
	return ""
}

func containsAny(text string, words ...string) bool {
	return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(text, w) })
}

// overTLS is c with TLS and a config of its own, that may be changed. c may have none: a Dialer may use TLS
// by itself.
func (c command) overTLS() command {
	c.tls = cmp.Or(c.tls.Clone(), &tls.Config{})
	return c
}

// fixTLS returns the fix for a handshake that failed with err.
func fixTLS(cli command, err error) string {
	var (
		authority x509.UnknownAuthorityError
		host      x509.HostnameError
		invalid   x509.CertificateInvalidError
		header    tls.RecordHeaderError
	)
	switch {
	case errors.As(err, &authority):
		cli = cli.overTLS()
		cli.tls.RootCAs = x509.NewCertPool() // for --cacert
		return fmt.Sprintf("make this process trust the issuer of the server's certificate: "+
			"SSL_CERT_FILE for Open, TLSConfig.RootCAs for New; "+
			"this should answer PONG: %s PING", cli)
	case errors.As(err, &host):
		return "use a name that is in the server's certificate, or give it one with this name; " +
			"for New, TLSConfig.ServerName says which name to expect"
	case errors.As(err, &invalid):
		return fmt.Sprintf("renew the server's certificate, or set the clock of this machine: %v", err)
	case errors.As(err, &header):
		return "the server has no TLS on that port: use redis:// for Open, " +
			"a client without TLSConfig for New, or the server's tls-port"
	case strings.Contains(err.Error(), "certificate"):
		cli = cli.overTLS()
		cli.tls.Certificates = make([]tls.Certificate, 1) // for --cert and --key
		return fmt.Sprintf("the server requires a client certificate that it trusts: "+
			"TLSConfig.Certificates for New, or tls-auth-clients no on the server; "+
			"this should answer PONG: %s PING", cli)
	}
	return fmt.Sprintf("client and server need a TLS version and a cipher in common: "+
		"tls-protocols and tls-ciphers of the server, TLSConfig for New; this should answer PONG: %s PING", cli)
}
