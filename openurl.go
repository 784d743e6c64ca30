package flightlock

import (
	"fmt"
	"net/url"
	"regexp"
	"strings"
)

// This file formats bad URLs for errors, without the passwords inside. If one of its characters was
// not written as %XX, a password may be nearly anywhere in a URL: after a / it is parsed as a path,
// after & as a parameter's name, before ? as a port. So only parts that are known to be harmless are
// shown, and the reason, which quotes from the URL, only if it contains nothing that was hidden.

const hidden = "xxxxx"

// harmless are the parameters whose values are not secret.
var harmless = regexp.MustCompile(`^(addr|db|master_name|username|client_name|protocol|skip_verify|[a-z]+(_[a-z]+)*_(timeout|size|conns|dials|time|lifetime|retries|backoff|jitter|fifo|redirects|only|enabled|latency|randomly|tolerance|replicas|resp3))$`)

// plainURL matches URLs without room for a password: a scheme, a host, a port and a database at
// most.
var plainURL = regexp.MustCompile(`^([a-z]+://)?[\w.\-]*(:\d{1,5})?(/\d*)?$`)

// withoutPassword returns a URL, and the reason why it is refused, without secrets.
func withoutPassword(rawURL string, refused error) (shown, why string) {
	u, err := url.Parse(rawURL)
	switch {
	case plainURL.MatchString(rawURL):
		if err != nil {
			return fmt.Sprintf("%q", rawURL), wantURL
		}
		return fmt.Sprintf("%q", rawURL), refused.Error()
	case err != nil, u.Opaque != "", strings.Contains(rawURL, "#"), strings.Count(rawURL, "@") > ats(u):
		scheme, _, found := strings.Cut(rawURL, "://")
		if !found || !plainURL.MatchString(scheme) {
			return "not shown", wantURL
		}
		return fmt.Sprintf("%q", scheme+"://"+hidden), wantURL + ", with special characters of user and password written as %XX"
	}
	var secrets []string
	hide := func(s string) string {
		secrets = append(secrets, s)
		if plain, err := url.QueryUnescape(s); err == nil {
			secrets = append(secrets, plain)
		}
		return hidden
	}
	user := ""
	if u.User == nil {
	} else if p, set := u.User.Password(); set {
		user = url.User(u.User.Username()).String() + ":" + hide(p) + "@"
	} else { // a password in the wrong place, maybe
		user = hide(u.User.Username()) + "@"
	}
	shown = u.Scheme + "://" + user + u.Host + u.EscapedPath()
	if u.RawQuery != "" {
		shown += "?" + showQuery(u.RawQuery, hide)
	}
	why = refused.Error()
	for _, s := range secrets {
		if s != "" && strings.Contains(why, s) {
			why = "a parameter is invalid, or a special character in a value is not written as %XX"
		}
	}
	return fmt.Sprintf("%q", shown), why
}

// ats is the number of @ in a URL whose special characters are written as %XX.
func ats(u *url.URL) int {
	if u.User == nil {
		return 0
	}
	return 1
}

// showQuery shows the names of parameters, and the values that are harmless. The text after a
// secret may be the rest of it.
func showQuery(raw string, hide func(string) string) string {
	var parts []string
	secret := false
	for part := range strings.SplitSeq(raw, "&") {
		name, value, set := strings.Cut(part, "=")
		known := harmless.MatchString(name)
		if !known && name != "password" && name != "sentinel_password" && (secret || !plainName.MatchString(name)) {
			name = hide(name)
		}
		if set && !known {
			value, secret = hide(value), true
		}
		if set {
			name += "=" + value
		}
		parts = append(parts, name)
	}
	return strings.Join(parts, "&")
}

var plainName = regexp.MustCompile(`^[A-Za-z_]+$`)
