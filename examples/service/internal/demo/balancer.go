package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// balancer stands where a proxy would: between the callers and the processes. It gives requests to the
// processes in turn, skips those that do not say that they are healthy, and gives a request whose connection
// was refused to another process, once. Such a request has not reached anybody, so this is safe for a POST,
// too.
type balancer struct {
	client *http.Client
	names  []string
	urls   []string
	up     []atomic.Bool
	next   atomic.Uint64

	stop chan struct{} // closed by close: the health checks end
	done sync.WaitGroup
}

const (
	checkEvery   = 100 * time.Millisecond
	checkTimeout = 2 * time.Second
	// callTimeout is the patience of a caller. It is longer than everything that the service promises.
	callTimeout = 15 * time.Second
)

func newBalancer(names, urls []string) *balancer {
	b := &balancer{
		client: &http.Client{Transport: &http.Transport{
			MaxIdleConns: 4096, MaxIdleConnsPerHost: 1024, IdleConnTimeout: 30 * time.Second,
		}},
		names: names, urls: urls, up: make([]atomic.Bool, len(urls)), stop: make(chan struct{}),
	}
	for i := range urls {
		b.done.Go(func() { b.watch(i) })
	}
	return b
}

func (b *balancer) close() {
	close(b.stop)
	b.done.Wait()
	b.client.CloseIdleConnections()
}

// watch asks a process again and again whether it is healthy.
func (b *balancer) watch(i int) {
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for {
		select {
		case <-b.stop:
			return
		case <-tick.C:
			b.up[i].Store(b.healthy(i))
		}
	}
}

func (b *balancer) healthy(i int) bool {
	ctx, cancel := context.WithTimeout(context.Background(), checkTimeout)
	defer cancel()
	return healthy(ctx, b.urls[i])
}

// pick returns the next healthy process other than not; if there is none, the next one.
func (b *balancer) pick(not int) int {
	n := uint64(len(b.urls))
	at := b.next.Add(1)
	for k := range n {
		if i := int((at + k) % n); i != not && b.up[i].Load() {
			return i
		}
	}
	if i := int(at % n); i != not || n == 1 {
		return i
	}
	return int((at + 1) % n)
}

// do sends a request to a process, or to another if that refuses the connection.
func (b *balancer) do(ctx context.Context, method,
	path string) (process, status int, body string, err error) {
	process = b.pick(-1)
	status, body, err = b.send(ctx, method, b.urls[process]+path)
	if errors.Is(err, syscall.ECONNREFUSED) {
		b.up[process].Store(false) // until the next check
		process = b.pick(process)
		status, body, err = b.send(ctx, method, b.urls[process]+path)
	}
	return process, status, body, err
}

// send sends one request.
func (b *balancer) send(ctx context.Context, method, url string) (status int, body string, err error) {
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := b.client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(data), err
}

// admin sends a POST to the processes named.
func (b *balancer) admin(path string, processes ...int) error {
	var errs []error
	for _, i := range processes {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		status, body, err := b.send(ctx, http.MethodPost, b.urls[i]+path)
		cancel()
		if err == nil && status/100 != 2 {
			err = fmt.Errorf("status %d: %s", status, body)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: POST %s: %w", b.names[i], path, err))
		}
	}
	return errors.Join(errs...)
}
