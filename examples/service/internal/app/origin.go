package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"
)

// errOrigin says that the origin, and nobody else, failed.
var errOrigin = errors.New("the origin failed")

// origin is where values come from: slow, dear, and not ours.
type origin struct {
	base   string
	token  atomic.Pointer[string]
	client *http.Client
}

func newOrigin(base, token string) *origin {
	o := &origin{base: base, client: &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 256, // as many as loads may run; the default of 2 would dial for nearly every load
		IdleConnTimeout:     time.Minute,
	}}}
	o.setToken(token)
	return o
}

func (o *origin) setToken(token string) { o.token.Store(&token) }

// load gets one value. ctx bounds it. fence tells the origin who it is that loads: 0 for nobody with a lock.
func (o *origin) load(ctx context.Context, key string, fence int64) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, o.base+"/load/"+url.PathEscape(key), nil)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errOrigin, err)
	}
	req.Header.Set("Authorization", "Bearer "+*o.token.Load())
	if fence != 0 {
		req.Header.Set("X-Fence", strconv.FormatInt(fence, 10))
	}
	resp, err := o.client.Do(req)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errOrigin, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxValue+1))
	switch {
	case err != nil:
		return "", fmt.Errorf("%w: %w", errOrigin, err)
	case resp.StatusCode != http.StatusOK:
		return "", fmt.Errorf("%w: %s of %q", errOrigin, resp.Status, key)
	case len(body) > maxValue:
		return "", fmt.Errorf("%w: more than %d bytes for %q", errOrigin, maxValue, key)
	}
	return string(body), nil
}

// maxValue is how many bytes a value may have.
const maxValue = 1 << 20

func (o *origin) close() { o.client.CloseIdleConnections() }
