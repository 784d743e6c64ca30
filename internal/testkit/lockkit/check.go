package lockkit

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/flightlock/flightlock/internal/testkit"
	"github.com/redis/go-redis/v9"
)

// ACLRule is a rule in docs/operations.md.
type ACLRule struct {
	user             string
	others, Commands []string
}

func (r ACLRule) Without(command string) ACLRule {
	r.Commands = slices.DeleteFunc(slices.Clone(r.Commands), func(c string) bool { return c == command })
	return r
}

// Apply gives the rule to its user.
func (r ACLRule) Apply(t *testing.T, s *redistest.Server) {
	t.Helper()
	args := []any{"ACL", "SETUSER", r.user}
	for _, word := range append(slices.Clone(r.others), r.Commands...) {
		args = append(args, word)
	}
	s.Do(t, args...)
}

// DocumentedACL returns the rule of the docs, the commands that a Cluster needs as well, and those
// that the quarantine needs.
func DocumentedACL(t *testing.T) []ACLRule { return DocumentedRules(t, "app", 3) }

// DocumentedRules returns the rules of the docs for that user, of which there must be so many.
func DocumentedRules(t *testing.T, user string, want int) (rules []ACLRule) {
	t.Helper()
	text, err := os.ReadFile(testkit.File("docs/operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?m)^ACL SETUSER "+user+" (.*)$").FindAllStringSubmatch(string(text),
		-1) {
		r := ACLRule{user: user}
		for _, word := range strings.Fields(m[1]) {
			if strings.HasPrefix(word, "+") {
				r.Commands = append(r.Commands, word)
			} else {
				r.others = append(r.others, strings.Replace(word, "PASSWORD", "pw", 1))
			}
		}
		rules = append(rules, r)
	}
	if len(rules) != want {
		t.Fatalf("%d rules for %s in the docs, want %d", len(rules), user, want)
	}
	return rules
}

func Check(t *testing.T, c *flightlock.Client) flightlock.Report {
	t.Helper()
	r, err := c.Check(t.Context())
	if err != nil {
		t.Fatalf("Check: %v\n%s", err, r)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("report:\n%s", r)
		}
	})
	return r
}

// CheckReached is a Check that had time to reach all nodes: on a busy machine, it is repeated.
func CheckReached(t *testing.T, c *flightlock.Client) (r flightlock.Report) {
	t.Helper()
	redistest.Eventually(t, time.Minute, "all nodes answer in time", func() bool {
		r = Check(t, c)
		return !slices.ContainsFunc(r.Findings, func(f flightlock.Finding) bool {
			return f.Check == "reachable" && f.Status != flightlock.StatusOK
		})
	})
	return r
}

// WantFinding finds one finding, by its check and a part of its node's name, and compares its
// status and text.
func WantFinding(t *testing.T, r flightlock.Report, nodeName, name string, status flightlock.Status,
	says ...string) {
	t.Helper()
	for _, f := range r.Findings {
		if f.Check != name || !strings.Contains(f.Node, nodeName) {
			continue
		}
		if f.Status != status {
			t.Errorf("%s: %s, want %s", name, f.Status, status)
		}
		for _, s := range says {
			if !strings.Contains(f.Found+" | "+f.Fix, s) {
				t.Errorf("%s does not say %q: %+v", name, s, f)
			}
		}
		if f.Why == "" || (f.Status == flightlock.StatusWarn || f.Status == flightlock.StatusFail) && f.Fix == "" {
			t.Errorf("%s without why or fix: %+v", name, f)
		}
		return
	}
	t.Errorf("no finding %q on %q", name, nodeName)
}

// DialOnce is a client of some address that limits the time of dials as those of Open do.
func DialOnce(t *testing.T, addr string) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: addr, DialerRetries: 1})
	t.Cleanup(func() { c.Close() })
	return c
}

// ACLSetUser is the command that creates a user with these rights.
func ACLSetUser(user, rights string) []any {
	args := []any{"ACL", "SETUSER", user}
	for _, r := range strings.Fields(rights) {
		args = append(args, r)
	}
	return args
}
