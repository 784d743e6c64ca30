package demo

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/flightlock/flightlock/internal/histogram"
)

// Report is what a run of the demo found.
type Report struct {
	Config     Config
	Servers    string
	Go, System string
	CPUs       int
	At         time.Time
	Rows       []Row
}

// Row is a phase of one variant.
type Row struct {
	Phase, Variant string
	Skipped        string // why it was not played
	weather
	From, Until time.Time

	Calls                  uint64
	PerSecond              float64
	P50, P99, P999, Max    time.Duration // of /item and /page, from when a call was due
	ItemP99, PageP99       time.Duration
	TransferP99            time.Duration
	HotCalls               uint64        // for the hottest keys, from a second after what was stopped stopped
	HotP999                time.Duration // of them
	RoundTrip, RoundTrip99 time.Duration // of a PING to the cache's server meanwhile
	NodesMax               time.Duration // the longest PING to the node in the middle
	CPU                    Processors
	Loads                  loadCounts
	Unlocked               uint64   // loads without a lock, by what the processes say
	Surplus                []string // some loads that were not a miss's first
	Errors                 map[string]int
	OfBroken               map[string]int // errors of the process that was broken
	Recovery               time.Duration  // from the end of the phase until callers saw no errors
	Twice, Never           int            // ticks
	Leaders                int            // at once, at most
	Leaderless             time.Duration  // the longest time
	MoneyLost              int64
	Unpaid                 int64 // transfers answered 200 that the ledger does not have
}

// Processors are shares of the machine's processors: those that were busy with the demo, which is callers and
// origin, with the service, and with the servers.
type Processors struct{ Demo, Service, Servers float64 }

func (p Processors) String() string {
	return fmt.Sprintf("%.0f%% = %.0f+%.0f+%.0f",
		100*(p.Demo+p.Service+p.Servers), 100*p.Demo, 100*p.Service, 100*p.Servers)
}

func (r *Row) measure(saw *seen, trips *histogram.Histogram, loads loadCounts) {
	r.Calls = saw.reads.Count() + saw.transfers.Count()
	r.PerSecond = float64(r.Calls) / r.Until.Sub(r.From).Seconds()
	r.P50, r.P99 = saw.reads.Quantile(0.5), saw.reads.Quantile(0.99)
	r.P999, r.Max = saw.reads.Quantile(0.999), saw.reads.Max()
	r.ItemP99, r.PageP99 = saw.items.Quantile(0.99), saw.pages.Quantile(0.99)
	r.TransferP99 = saw.transfers.Quantile(0.99)
	r.HotCalls, r.HotP999 = saw.hotLate.Count(), saw.hotLate.Quantile(0.999)
	r.RoundTrip, r.RoundTrip99 = trips.Quantile(0.5), trips.Quantile(0.99)
	r.Loads = loads
}

// line is the row as a line of progress.
func (r *Row) line(number, of int) string {
	return fmt.Sprintf("%-12s %2d/%d %-22s %6.0f req/s  cpu %s  "+
		"p50 %-7s p99 %-7s (items %s, pages %s, transfers %s) p99.9 %-7s max %-7s rtt %s/%s  "+
		"%d loads, %d surplus, %d unlocked  lost %d/%d  rest %s  %s",
		r.Variant, number, of, r.Phase, r.PerSecond, r.CPU,
		duration(r.P50), duration(r.P99), duration(r.ItemP99), duration(r.PageP99), duration(r.TransferP99),
		duration(r.P999), duration(r.Max), duration(r.RoundTrip), duration(r.RoundTrip99),
		r.Loads.Loads, r.Loads.Loads-r.Loads.First, r.Unlocked, r.MoneyLost, r.Unpaid,
		duration(r.Recovery), r.errorCell())
}

func (r *Row) errorCell() string {
	text := errorText(r.Errors)
	if of := errorText(r.OfBroken); of != "" {
		if text != "" {
			text += "; "
		}
		text += "its own " + of
	}
	if text == "" {
		return "0"
	}
	return text
}

// unsafe reports whether flightlock lost something, did something twice or had two leaders: at no time may
// it.
func (r *Report) unsafe() bool {
	for i := range r.Rows {
		row := &r.Rows[i]
		if row.Variant == "flightlock" && (row.MoneyLost != 0 || row.Unpaid != 0 || row.Twice != 0 ||
			row.Leaders > 1) {
			return true
		}
	}
	return false
}

// header is the table's first line.
var header = []string{"phase", "with", "req/s", "p50", "p99", "p99.9", "longest", "loads", "loads per miss",
	"without a lock", "errors", "ticks twice / not at all", "leaders at once", "money lost"}

// Write writes the table, for pasting into a page of documentation.
func (r *Report) Write(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d processors, %s %s; %s. "+
		"%d processes, %d calls a second, %d items, origin %v, phases of %gs.\n\n",
		r.At.Format("2006-01-02"), r.CPUs, r.Go, r.System, r.Servers,
		r.Config.Procs, r.Config.Rate, r.Config.Keys, r.Config.Latency, r.Config.Seconds)
	line := func(cells []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	line(header)
	rule := make([]string, len(header))
	for i := range rule {
		rule[i] = "---:"
	}
	rule[0], rule[1], rule[10] = "---", "---", "---"
	line(rule)
	for _, p := range phases() {
		name := p.name
		for i := range r.Rows {
			if row := &r.Rows[i]; row.Phase == p.name {
				line(append([]string{name}, row.cells()...))
				name = ""
			}
		}
	}
	b.WriteString("\nLatencies are those of `/item` and `/page` from when a call was due. " +
		"Errors are answers, by status. Loads without a lock are those that the processes count.\n")
	fmt.Fprintf(&b, "\n%s", r.goals())
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *Row) cells() []string {
	if r.Skipped != "" {
		return []string{r.Variant, "not played: " + r.Skipped, "", "", "", "", "", "", "", "", "", "", ""}
	}
	unlocked := fmt.Sprint(r.Unlocked)
	if r.Variant == "singleflight" {
		unlocked = "all"
	}
	money := fmt.Sprint(r.MoneyLost)
	if r.Unpaid > 0 {
		money += fmt.Sprintf(", %d transfers", r.Unpaid)
	}
	return []string{r.Variant, fmt.Sprintf("%.0f", r.PerSecond), duration(r.P50), duration(r.P99),
		duration(r.P999), duration(r.Max), fmt.Sprint(r.Loads.Loads), fmt.Sprintf("%.2f", r.Loads.perMiss()),
		unlocked, r.errorCell(), fmt.Sprintf("%d / %d", r.Twice, r.Never), fmt.Sprint(r.Leaders), money}
}

// duration is short: three digits.
func duration(d time.Duration) string {
	switch {
	case d == 0:
		return "-"
	case d < time.Millisecond:
		return d.Round(10 * time.Microsecond).String()
	case d < 10*time.Millisecond:
		return d.Round(100 * time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	default:
		return d.Round(10 * time.Millisecond).String()
	}
}

// lines writes lines for people to a terminal, with one at the bottom that changes.
type lines struct {
	w        io.Writer
	terminal bool

	mu sync.Mutex // keeps lines apart
}

func newLines(f *os.File) *lines {
	info, err := f.Stat()
	return &lines{w: f, terminal: err == nil && info.Mode()&os.ModeCharDevice != 0}
}

func (l *lines) logf(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.terminal {
		fmt.Fprint(l.w, "\r\x1b[K")
	}
	fmt.Fprintf(l.w, format+"\n", args...)
}

// progress shows the line that changes, on a terminal only.
func (l *lines) progress(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.terminal {
		fmt.Fprint(l.w, "\r\x1b[K", line)
	}
}
