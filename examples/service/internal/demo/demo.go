// Package demo is the harness around the service: it starts the processes, the servers that they lock on and
// an origin that is slow or broken when told to, sends requests as many callers do, plays what happens to
// services, and counts what must not happen. It plays the same for each variant of the service and writes one
// table.
package demo

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// Config is what the flags say. The zero value of a field that Flags does not set is its default.
type Config struct {
	Redis   string        // servers to lock on; "": servers of the demo's own
	Cache   string        // the server with the values, with Redis; "": the first of them
	Seconds float64       // of a phase
	Only    string        // names of phases; "": all
	With    string        // variants
	Out     string        // a file for the table; "": stdout
	Procs   int           // processes of the service
	Rate    int           // calls per second
	Keys    int           // of the cold start, and among which callers choose
	Latency time.Duration // of the origin, when it is well
	Spin    int           // goroutines per processor that burn it when processors are busy, in each process
	// a directory for the logs of the processes; "": they are shown where something went wrong
	Logs string

	Exe  string   // the service; "": this executable
	Env  []string // for the service's processes, besides the demo's own
	Logf func(format string, args ...any)

	progress  func(line string) // nil: no line that changes
	seed      uint64
	redisURLs []string
}

// Flags adds the demo's flags to fs. The Config is filled in when fs is parsed.
func Flags(fs *flag.FlagSet) *Config {
	cfg := &Config{}
	fs.StringVar(&cfg.Redis, "redis", "",
		"servers to lock on, with commas between them; they are neither stopped nor flushed. "+
			"Default: servers of the demo's own")
	fs.StringVar(&cfg.Cache, "cache", "",
		"the server that keeps the values, with -redis; default the first of those")
	fs.StringVar(&cfg.With, "with", "",
		"variants of the service, with commas between them; default "+strings.Join(Variants, ","))
	fs.StringVar(&cfg.Only, "only", "", "phases to play, with commas between them: "+strings.Join(phaseNames(),
		","))
	fs.Float64Var(&cfg.Seconds, "seconds", 5, "how long a phase is")
	fs.IntVar(&cfg.Procs, "procs", 4, "processes of the service")
	fs.IntVar(&cfg.Rate, "rate", 0, fmt.Sprintf("calls per second; default %d, with embedded nodes a tenth",
		defaultRate))
	fs.IntVar(&cfg.Keys, "keys", 0, fmt.Sprintf("items; default %d, with embedded nodes a tenth", defaultKeys))
	fs.IntVar(&cfg.Spin, "spin", 2, "goroutines per processor and process that burn it when processors are busy")
	fs.StringVar(&cfg.Out, "out", "", "a file for the table; default stdout")
	fs.StringVar(&cfg.Logs, "logs", "", "a directory for the logs of the processes")
	return cfg
}

const (
	// defaultRate is what keeps two processors half busy in the phase "steady".
	defaultRate = 1000
	defaultKeys = 20_000
)

// Variants are the ways of the service to protect its origin, in the order of the table.
var Variants = []string{"flightlock", "singleflight", "redsync"}

// freshFor is how long the service keeps a value. It is short so that even the hottest keys are loaded in
// every phase. rediscache shortens it by up to a tenth (Options.Jitter).
const freshFor = 3 * time.Second

// complete checks the flags and sets defaults.
func (cfg Config) complete() (Config, error) {
	if cfg.With == "" || cfg.With == "all" {
		cfg.With = strings.Join(Variants, ",")
	}
	for _, v := range strings.Split(cfg.With, ",") {
		if !slices.Contains(Variants, v) {
			return cfg, fmt.Errorf("-with %q: want some of %s", v, strings.Join(Variants, ", "))
		}
	}
	if _, err := choosePhases(cfg.Only); err != nil {
		return cfg, err
	}
	if cfg.Redis != "" {
		urls, err := parseServers(cfg.Redis)
		if err != nil {
			return cfg, fmt.Errorf("-redis: %w", err)
		}
		cfg.redisURLs = urls
	}
	cfg.Seconds = cmp.Or(cfg.Seconds, 5)
	cfg.Procs = cmp.Or(cfg.Procs, 4)
	part := 1
	if len(cfg.redisURLs) == 0 && !haveRedis() { // Lua interpreters in this process
		part = 10
	}
	cfg.Rate = cmp.Or(cfg.Rate, defaultRate/part)
	cfg.Keys = cmp.Or(cfg.Keys, defaultKeys/part)
	cfg.Latency = cmp.Or(cfg.Latency, 20*time.Millisecond)
	cfg.Spin = cmp.Or(cfg.Spin, 2)
	cfg.seed = cmp.Or(cfg.seed, uint64(time.Now().UnixNano()))
	if cfg.Logf == nil {
		cfg.Logf = func(string, ...any) {}
	}
	if cfg.Seconds < 0.5 || cfg.Seconds > 600 {
		return cfg, fmt.Errorf("-seconds %v: want 0.5 to 600", cfg.Seconds)
	}
	if cfg.Procs < 2 || cfg.Procs > 32 {
		return cfg, fmt.Errorf("-procs %d: want 2 to 32", cfg.Procs)
	}
	if cfg.Rate < 10 || cfg.Rate > 100_000 {
		return cfg, fmt.Errorf("-rate %d: want 10 to 100000", cfg.Rate)
	}
	if cfg.Keys < 100 || cfg.Keys > 1_000_000 {
		return cfg, fmt.Errorf("-keys %d: want 100 to 1000000", cfg.Keys)
	}
	if cfg.Exe == "" {
		exe, err := os.Executable()
		if err != nil {
			return cfg, fmt.Errorf("finding this program to start it again: %w", err)
		}
		cfg.Exe = exe
	}
	return cfg, nil
}

// Main plays the demo and writes the table. It returns the exit code: 1 if the demo could not be played, or
// if flightlock lost an update, ran a tick twice or had two leaders; 2 for wrong flags.
func Main(ctx context.Context, cfg *Config) int {
	c, err := cfg.complete()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	out := io.Writer(os.Stdout)
	if c.Out != "" {
		f, err := os.Create(c.Out)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer f.Close()
		out = f
	}
	screen := newLines(os.Stderr)
	c.Logf, c.progress = screen.logf, screen.progress
	report, err := Run(ctx, c)
	if report != nil {
		if werr := report.Write(out); err == nil {
			err = werr
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if report.unsafe() {
		return 1
	}
	return 0
}

// Run plays the demo. With an error the report has what was played until then.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	report := &Report{Config: cfg, Go: runtime.Version(), System: runtime.GOOS + "/" + runtime.GOARCH,
		CPUs: runtime.NumCPU(), At: time.Now()}
	for _, variant := range strings.Split(cfg.With, ",") {
		rows, kind, err := playVariant(ctx, cfg, variant)
		report.Servers = kind
		report.Rows = append(report.Rows, rows...)
		if err != nil {
			return report, fmt.Errorf("%s: %w", variant, err)
		}
	}
	return report, nil
}

// playVariant plays all phases with servers, processes and a database of their own.
func playVariant(ctx context.Context, cfg Config, variant string) (rows []Row, kind string, err error) {
	s, err := newStage(ctx, cfg, variant)
	if err != nil {
		return nil, "", err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	phases, err := choosePhases(cfg.Only)
	if err != nil {
		return nil, "", err
	}
	for i, p := range phases {
		row, err := s.play(ctx, p, i+1, len(phases))
		if err != nil {
			return s.rows, s.servers.kind, fmt.Errorf("phase %q: %w", p.name, err)
		}
		s.rows = append(s.rows, row)
	}
	return s.rows, s.servers.kind, s.audit(ctx)
}
