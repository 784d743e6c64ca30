package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
)

// errOrigin reports that the origin failed, and nothing else did.
var errOrigin = errors.New("the origin failed")

// maxValue is the size limit of a value, in bytes.
const maxValue = 1 << 20

// origin is the client of the server that values come from. It is slow, and others use it, too.
type origin struct {
	base   string
	token  atomic.Pointer[string]
	client *http.Client
}

func newOrigin(base, token string) *origin {
	o := &origin{base: base, client: &http.Client{Transport: &http.Transport{
		// A dial goes on after the ctx of its request has ended. Without a limit of its own it would
		// do so for minutes if the origin does not answer, and each load would add one.
		DialContext:         (&net.Dialer{Timeout: 2 * time.Second}).DialContext,
		TLSHandshakeTimeout: 2 * time.Second,
		ForceAttemptHTTP2:   true, // as without a DialContext
		MaxIdleConnsPerHost: 128,  // one for each load; with the default of 2, most loads would dial
		IdleConnTimeout:     time.Minute,
	}}}
	o.setToken(token)
	return o
}

func (o *origin) setToken(token string) { o.token.Store(&token) }

// load gets one value; ctx bounds it.
func (o *origin) load(ctx context.Context, key string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, o.base+"/load/"+url.PathEscape(key), nil)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errOrigin, err)
	}
	req.Header.Set("Authorization", "Bearer "+*o.token.Load())
	resp, err := o.client.Do(req)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errOrigin, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxValue+1))
	switch {
	case err != nil:
		return "", fmt.Errorf("%w: %w", errOrigin, err)
	case resp.StatusCode == http.StatusNotFound:
		return "", fmt.Errorf("%w: %q", variant.ErrNotFound, key)
	case resp.StatusCode != http.StatusOK:
		return "", fmt.Errorf("%w: %s for %q", errOrigin, resp.Status, key)
	case len(body) > maxValue:
		return "", fmt.Errorf("%w: more than %d bytes for %q", errOrigin, maxValue, key)
	}
	return string(body), nil
}

func (o *origin) close() { o.client.CloseIdleConnections() }
