package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"github.com/flightlock/flightlock/internal/histogram"
)

// report is all figures of a run, as -json writes them. Durations are nanoseconds.
type report struct {
	Time       time.Time `json:"time"`
	Go         string    `json:"go"`
	System     string    `json:"system"`
	CPUs       int       `json:"cpus"`
	Embedded   bool      `json:"embedded"` // the nodes are miniredis in the bench's own process
	Nodes      []string  `json:"nodes"`
	Clients    int       `json:"clients"`
	Procs      int       `json:"procs"` // 0: the clients ran in the bench's own process
	Callers    int       `json:"callers"`
	Goroutines int       `json:"goroutines"`
	Polling    int       `json:"polling"` // of the clients

	Linger time.Duration `json:"linger_ns"`
	Work   time.Duration `json:"work_ns"` // under the lock of the hot key

	// What -only left out is not there.
	Stampede []stampedeFigures `json:"stampede,omitempty"`
	HotKey   *hotKeyFigures    `json:"hot_key,omitempty"`
	NodeDies *nodeDiesFigures  `json:"node_dies,omitempty"`

	ViolationCount uint64   `json:"violation_count"`
	Violations     []string `json:"violations"` // the first of them
}

type latency struct {
	P50 time.Duration `json:"p50_ns"`
	P90 time.Duration `json:"p90_ns"`
	P99 time.Duration `json:"p99_ns"`
	Max time.Duration `json:"max_ns"`
}

type stampedeFigures struct {
	Way          string                `json:"way"`
	Misses       int                   `json:"misses"`
	Loads        uint64                `json:"loads"`
	LoadsPerMiss float64               `json:"loads_per_miss"`
	Callers      latency               `json:"callers"`
	Lost         uint64                `json:"lost"`
	Errors       map[string]errorCount `json:"errors"`

	// Of the lock protocol, per miss, client and node.
	Commands float64 `json:"commands"`
}

type hotKeyFigures struct {
	Locks           uint64                `json:"locks"`
	LocksPerSecond  float64               `json:"locks_per_second"`
	Wait            latency               `json:"wait"`
	Commands        uint64                `json:"commands"`
	CommandsPerLock float64               `json:"commands_per_lock"`
	Handoffs        uint64                `json:"handoffs"`
	Attempts        uint64                `json:"attempts"`
	LongestGap      time.Duration         `json:"longest_gap_ns"`
	Shares          []shareFigures        `json:"shares"`
	Jain            float64               `json:"jain"` // fairness index of the shares' holding times
	Clients         []clientOutcome       `json:"clients"`
	Lost            uint64                `json:"lost"`
	Errors          map[string]errorCount `json:"errors"`
}

type nodeDiesFigures struct {
	Skipped string       `json:"skipped,omitempty"` // why it was not run
	Parts   []partFigure `json:"parts,omitempty"`   // before, during, after
	Lost    uint64       `json:"lost"`
}

type partFigure struct {
	Name              string                `json:"name"`
	LocksPerSecond    float64               `json:"locks_per_second"`
	Wait              latency               `json:"wait"`
	LongestGap        time.Duration         `json:"longest_gap_ns"`
	OwnLocksPerSecond float64               `json:"own_locks_per_second"`
	OwnWait           latency               `json:"own_wait"`
	Errors            map[string]errorCount `json:"errors"`
}

func newReport(b *bench) *report {
	return &report{
		Time: time.Now(), Go: runtime.Version(), System: runtime.GOOS + "/" + runtime.GOARCH,
		CPUs:     runtime.NumCPU(),
		Embedded: len(b.nodes.embedded) > 0, Nodes: b.nodes.hosts(),
		Clients: b.cfg.clients, Procs: b.cfg.procs, Callers: b.cfg.callers, Goroutines: b.cfg.goroutines,
		Polling: b.cfg.polling, Linger: b.cfg.linger, Work: b.cfg.work,
	}
}

// violated notes n broken promises, and messages about the first of them.
func (r *report) violated(n uint64, messages ...string) {
	r.ViolationCount += n
	r.Violations = append(r.Violations, messages...)
	r.Violations = r.Violations[:min(len(r.Violations), maxMessages)]
}

func (r *report) addStampede(kind string, misses, nodes int, o *outcome) {
	p := o.Parts[0]
	r.violated(o.Violations, prefixed("(a) ", o.Messages)...)
	r.Stampede = append(r.Stampede, stampedeFigures{
		Way: kind, Misses: misses, Loads: o.Loads, LoadsPerMiss: float64(o.Loads) / float64(misses),
		Callers: latencyOf(p.Waits), Lost: o.Lost, Errors: p.Errors,
		// Clients has one entry per miss and client
		Commands: float64(o.totals().Commands) / float64(len(o.Clients)*nodes),
	})
}

func (r *report) addHotKey(d time.Duration, o *outcome, gaps []time.Duration) {
	p, sum := o.Parts[0], o.totals()
	r.violated(o.Violations, prefixed("(b) ", o.Messages)...)
	all := sharesOf(o.Clients, r.Procs > 0)
	r.HotKey = &hotKeyFigures{
		Locks: p.Locks, LocksPerSecond: float64(p.Locks) / d.Seconds(), Wait: latencyOf(p.Waits),
		Commands: sum.Commands, CommandsPerLock: ratio(sum.Commands, p.Locks), Handoffs: sum.Handoffs,
		Attempts: sum.Attempts, LongestGap: gaps[0], Shares: all, Jain: jain(all), Clients: o.Clients,
		Lost: o.Lost, Errors: p.Errors,
	}
}

func (r *report) addNodeDies(part time.Duration, o *outcome, gaps []time.Duration) {
	r.violated(o.Violations, prefixed("(c) ", o.Messages)...)
	r.NodeDies = &nodeDiesFigures{Lost: o.Lost}
	for i, name := range []string{"before", "during", "after"} {
		p := o.Parts[i]
		r.NodeDies.Parts = append(r.NodeDies.Parts, partFigure{
			Name: name, LocksPerSecond: float64(p.Locks) / part.Seconds(), Wait: latencyOf(p.Waits),
			LongestGap:        gaps[i],
			OwnLocksPerSecond: float64(p.Own) / part.Seconds(), OwnWait: latencyOf(p.OwnWaits), Errors: p.Errors,
		})
	}
}

func latencyOf(h *histogram.Histogram) latency {
	return latency{P50: h.Quantile(0.5), P90: h.Quantile(0.9), P99: h.Quantile(0.99), Max: h.Max()}
}

func ratio(a, b uint64) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

func prefixed(prefix string, messages []string) (out []string) {
	for _, m := range messages {
		out = append(out, prefix+m)
	}
	return out
}

// jsonOut is where -json writes to; without a file and a writer it writes nowhere.
type jsonOut struct {
	w    io.Writer
	file *os.File
}

func openJSON(path string, stdout io.Writer) (jsonOut, error) {
	switch path {
	case "":
		return jsonOut{}, nil
	case "-":
		return jsonOut{w: stdout}, nil
	}
	// Not truncated yet: a run that fails leaves the figures of the one before it.
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return jsonOut{}, fmt.Errorf("flag -json: %w", err)
	}
	return jsonOut{w: f, file: f}, nil
}

func (o jsonOut) write(r any) error {
	if o.w == nil {
		return nil
	}
	if o.file != nil {
		// Devices and pipes cannot be truncated and need not be.
		_ = o.file.Truncate(0)
	}
	enc := json.NewEncoder(o.w)
	enc.SetIndent("", "  ")
	if err := enc.Encode(r); err != nil {
		return fmt.Errorf("flag -json: %w", err)
	}
	return nil
}

func (o jsonOut) close() {
	if o.file != nil {
		o.file.Close()
	}
}
