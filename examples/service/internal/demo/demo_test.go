package demo

import (
	"flag"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/histogram"
	"github.com/flightlock/flightlock/internal/redistest"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestQuantiles(t *testing.T) {
	var h histogram.Histogram
	if h.Quantile(0.99) != 0 || h.Max() != 0 {
		t.Error("of nothing")
	}
	for i := range 1000 {
		h.Record(time.Duration(i+1) * time.Millisecond)
	}
	for q, want := range map[float64]time.Duration{
		0.5: 500 * time.Millisecond, 0.99: 990 * time.Millisecond, 1: time.Second,
	} {
		if got := h.Quantile(q); got < want || got > want*33/32 {
			t.Errorf("%v: %v, want %v", q, got, want)
		}
	}
	if h.Count() != 1000 || h.Max() != time.Second {
		t.Error(h.Count(), h.Max())
	}
}

func TestFlags(t *testing.T) {
	parse := func(args ...string) (Config, error) {
		fs := flag.NewFlagSet("demo", flag.ContinueOnError)
		fs.SetOutput(io.Discard)
		cfg := Flags(fs)
		if err := fs.Parse(args); err != nil {
			return Config{}, err
		}
		return cfg.complete()
	}
	cfg, err := parse()
	if err != nil || cfg.With != "flightlock,singleflight,redsync" || cfg.Procs != 4 || cfg.Exe == "" ||
		len(cfg.redisURLs) != 0 {
		t.Errorf("%+v, %v", cfg, err)
	}
	cfg, err = parse("-redis", "a:1,redis://b:2", "-with", "redsync", "-only", "steady,cold", "-seconds", "2")
	if err != nil || strings.Join(cfg.redisURLs, ",") != "redis://a:1,redis://b:2" ||
		cfg.With != "redsync" || cfg.Seconds != 2 {
		t.Errorf("%+v, %v", cfg, err)
	}
	for _, bad := range []string{
		"-redis=nowhere", "-redis=a:1,a:1", "-with=locks", "-only=never", "-seconds=0.1", "-procs=1", "-rate=1",
		"-keys=1",
	} {
		if _, err := parse(bad); err == nil || !strings.Contains(err.Error(), strings.Split(bad, "=")[0]) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestPhasesAreChosenByTheBeginningOfTheirNames(t *testing.T) {
	chosen, err := choosePhases("all-nodes,rolling deploy")
	if err != nil || len(chosen) != 2 || chosen[0].name != "rolling deploy" ||
		chosen[1].name != "all nodes stopped" {
		t.Error(chosen, err)
	}
	if all, err := choosePhases(""); err != nil || len(all) != 14 {
		t.Error(all, err)
	}
}

// The table has a row per phase and variant, those of a phase together, and says what was missed.
func TestTheTableSaysWhatHappened(t *testing.T) {
	cfg, err := Config{}.complete()
	if err != nil {
		t.Fatal(err)
	}
	r := Report{Config: cfg, Rows: []Row{
		{
			Phase: "steady", Variant: "flightlock", weather: fine | prompt, PerSecond: 999.6,
			P99: 12 * time.Millisecond, ItemP99: 12 * time.Millisecond, Leaders: 1,
			Loads: loadCounts{Loads: 30, First: 20}, Unlocked: 2,
		},
		{Phase: "cache flushed", Variant: "flightlock", Skipped: "for a reason"},
		{
			Phase: "steady", Variant: "singleflight",
			P99: 2 * time.Millisecond, ItemP99: 2 * time.Millisecond,
			MoneyLost: 70, Unpaid: 3, Twice: 4, Never: 1, Leaders: 4,
			Errors: map[string]int{"502": 3, "504": 1},
		},
	}}
	var b strings.Builder
	if err := r.Write(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| steady | flightlock | 1000 | - | 12ms | - | - | 30 | 1.50 | 2 | 0 | 0 / 0 | 1 | 0 |\n|  | " +
			"singleflight | 0 |",
		"| all | 502: 3, 504: 1 | 4 / 1 | 4 | 70, 3 transfers |",
		"| cache flushed | flightlock | not played: for a reason |",
		"- MISSED: steady: loads without a lock: 2 of 30\n" +
			"- MISSED: steady: 30 loads of 20 misses\n" +
			"- MISSED: steady: p99 of items 12ms",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
	if r.unsafe() {
		t.Error("what another variant does is no fault of flightlock")
	}
	for _, bad := range []Row{{MoneyLost: 1}, {Unpaid: 1}, {Twice: 1}, {Leaders: 2}} {
		bad.Variant = "flightlock"
		if r := (Report{Rows: []Row{bad}}); !r.unsafe() || len(r.Faults("flightlock")) != 1 {
			t.Errorf("%+v passes for safe", bad)
		}
	}
	for _, bad := range []Row{
		{Never: 1},
		{Errors: map[string]int{"502": 1}},
		{Loads: loadCounts{Loads: 1, First: 1}, Unlocked: 1},
		{Loads: loadCounts{Loads: 2, First: 1}},
	} {
		bad.Variant, bad.weather = "flightlock", fine
		if r := (Report{Rows: []Row{bad}}); len(r.Faults("flightlock")) != 1 || len(r.Slow("flightlock")) != 0 {
			t.Errorf("%+v: %v", bad, r.Faults("flightlock"))
		}
		for _, slow := range []Row{{RoundTrip99: time.Second}, {NodesMax: time.Second}} {
			bad.RoundTrip99, bad.NodesMax = slow.RoundTrip99, slow.NodesMax
			if r := (Report{Rows: []Row{bad}}); len(r.Slow("flightlock")) != 1 {
				t.Errorf("%+v is not slow", bad)
			}
		}
	}
}

// Servers of either kind keep what they know while they are stopped, and lose it when they are killed.
func TestServersAreStoppedAndKilled(t *testing.T) {
	for name, start := range map[string]func() (server, error){"real": startReal, "embedded": startEmbedded} {
		t.Run(name, func(t *testing.T) {
			if name == "real" {
				redistest.Require(t)
			}
			s, err := start()
			if err != nil {
				t.Fatal(err)
			}
			defer s.close()
			if _, err := roundTrips(s.url(), 3); err != nil {
				t.Fatal(err)
			}
			for _, step := range []func() error{s.stop, s.resume, s.kill, s.restart, s.flush} {
				if err := step(); err != nil {
					t.Fatal(err)
				}
			}
			if h, err := roundTrips(s.url(), 3); err != nil || h.Count() != 3 {
				t.Error(h, err)
			}
		})
	}
}
