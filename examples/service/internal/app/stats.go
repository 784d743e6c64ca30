package app

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"sync"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
)

// Stats are the counters of /stats, since the process started.
type Stats struct {
	variant.Stats
	Errors map[string]uint64 `json:"errors"` // of requests, by kind
}

// kinds counts errors by kind.
type kinds struct {
	mu sync.Mutex
	n  map[string]uint64 // guarded by mu
}

func (k *kinds) add(kind string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.n == nil {
		k.n = map[string]uint64{}
	}
	k.n[kind]++
}

func (k *kinds) read() map[string]uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.n == nil {
		return map[string]uint64{}
	}
	return maps.Clone(k.n)
}

var (
	errRequest = errors.New("bad request")
	errLate    = errors.New("not in time") // of a load whose own timeout is over, not the request's
)

// classify turns an error of a request into a kind, for the counters, and a status, for the
// client. ctx is the request's.
func classify(ctx context.Context, err error) (kind string, status int) {
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return "gone", http.StatusServiceUnavailable // the client has gone, and does not read it
	case ctx.Err() != nil, errors.Is(err, errLate):
		return "deadline", http.StatusGatewayTimeout
	case errors.Is(err, errRequest):
		return "request", http.StatusBadRequest
	case errors.Is(err, variant.ErrNotFound):
		return "missing", http.StatusNotFound
	case errors.Is(err, errNoAccount):
		return "account", http.StatusNotFound
	case errors.Is(err, errFunds):
		return "funds", http.StatusConflict
	case errors.Is(err, errOvertaken), errors.Is(err, variant.ErrLost):
		return "lost", http.StatusServiceUnavailable
	case errors.Is(err, errOrigin):
		return "origin", http.StatusBadGateway
	case errors.Is(err, variant.ErrNoLock):
		return "nolock", http.StatusServiceUnavailable
	}
	return "internal", http.StatusInternalServerError
}
