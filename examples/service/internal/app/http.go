package app

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// handler has all endpoints.
func (a *App) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /item/{id}", a.serve("item", a.item))
	mux.Handle("GET /page/{id}", a.serve("page", a.page))
	mux.Handle("POST /item/{id}/changed", a.serve("changed", a.itemChanged))
	mux.Handle("POST /transfer", a.serve("transfer", a.transfer))
	mux.Handle("GET /metrics", promhttp.HandlerFor(a.metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", a.healthz)
	mux.HandleFunc("GET /stats", a.statistics)
	if a.cfg.Admin {
		mux.HandleFunc("POST /admin/spin", a.adminSpin)
		mux.HandleFunc("POST /admin/token", a.adminToken)
	}
	return mux
}

// maxID is the size limit of an id in a request, in bytes.
const maxID = 256

// validID reports whether id may be part of a key in Redis. A key that is too long for a lock would
// be an internal error, though the mistake is the client's. And braces are the hash tag of a Cluster:
// the client would choose the slot, and could name the key that package fenced keeps a token in.
func validID(id string) bool {
	return id != "" && len(id) <= maxID && !strings.ContainsAny(id, "{}")
}

func (a *App) item(r *http.Request) (string, error) {
	id := r.PathValue("id")
	if !validID(id) {
		return "", fmt.Errorf("%w: the id of an item", errRequest)
	}
	return a.items.Fetch(r.Context(), itemKey(a.cfg.Prefix, id))
}

func (a *App) page(r *http.Request) (string, error) {
	number, err := strconv.ParseUint(r.PathValue("id"), 10, 31)
	if err != nil {
		return "", fmt.Errorf("%w: the number of a page: %w", errRequest, err)
	}
	return a.pages.Fetch(r.Context(), pageKey(a.cfg.Prefix, strconv.FormatUint(number, 10)))
}

// itemChanged is called by the origin after the commit that changed an item, until it is answered
// 200. From then on no process serves anything older, also if a load was under way.
func (a *App) itemChanged(r *http.Request) (string, error) {
	id := r.PathValue("id")
	if !validID(id) {
		return "", fmt.Errorf("%w: the id of an item", errRequest)
	}
	return "", a.invalidate(r.Context(), id)
}

func (a *App) transfer(r *http.Request) (string, error) {
	q := r.URL.Query()
	from, to := q.Get("from"), q.Get("to")
	amount, err := strconv.ParseInt(q.Get("amount"), 10, 64)
	if err != nil || amount <= 0 || !validID(from) || !validID(to) || from == to {
		return "", fmt.Errorf("%w: want ?from=a&to=b&amount=n with two accounts and n above 0", errRequest)
	}
	return "", a.bank.transfer(r.Context(), from, to, amount)
}

// serve makes get a handler, with a deadline, error handling and metrics.
func (a *App) serve(route string, get func(*http.Request) (string, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		ctx, cancel := context.WithTimeout(r.Context(), a.cfg.Timeout)
		defer cancel()
		if a.draining.Load() {
			// The client uses another connection for its next request. It would fail if
			// the server closed this one just then.
			w.Header().Set("Connection", "close")
		}
		status := http.StatusOK
		if body, err := get(r.WithContext(ctx)); err != nil {
			status = a.fail(ctx, w, route, err)
		} else {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			_, _ = io.WriteString(w, body) // fails if the client has gone
		}
		a.took.WithLabelValues(route, strconv.Itoa(status)).Observe(time.Since(began).Seconds())
	})
}

// fail answers a request that failed, and returns the status.
func (a *App) fail(ctx context.Context, w http.ResponseWriter, route string, err error) (status int) {
	kind, status := classify(ctx, err)
	a.kinds.add(kind)
	level := slog.LevelDebug // failed loads are logged by the cache, sampled
	if status == http.StatusInternalServerError {
		level = slog.LevelError
	}
	a.log.Log(ctx, level, "failed", "route", route, "kind", kind, "err", err)
	http.Error(w, kind, status) // the text of err names servers and keys: it is not for clients
	return status
}

func newTook(r prometheus.Registerer) (*prometheus.HistogramVec, error) {
	took := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "service_request_seconds", Help: "What requests took, by route and status.",
		Buckets: prometheus.ExponentialBuckets(0.0005, 2, 15),
	}, []string{"route", "status"})
	return took, r.Register(took)
}

// healthz tells the load balancer whether to send requests.
func (a *App) healthz(w http.ResponseWriter, _ *http.Request) {
	if !a.ready.Load() || a.draining.Load() {
		http.Error(w, "not now", http.StatusServiceUnavailable)
		return
	}
	_, _ = io.WriteString(w, "ok\n")
}

func (a *App) statistics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	s := Stats{Stats: a.items.Stats().Add(a.pages.Stats()), Errors: a.kinds.read()}
	if err := json.NewEncoder(w).Encode(s); err != nil {
		a.log.Debug("statistics", "err", err)
	}
}

func (a *App) adminSpin(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.Atoi(r.URL.Query().Get("n"))
	if err != nil || n < 0 || n > maxSpin {
		http.Error(w, fmt.Sprintf("want ?n=0 to %d", maxSpin), http.StatusBadRequest)
		return
	}
	a.spinner.set(n)
}

func (a *App) adminToken(_ http.ResponseWriter, r *http.Request) {
	a.origin.setToken(r.URL.Query().Get("t"))
}
