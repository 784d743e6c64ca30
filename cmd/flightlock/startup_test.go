//go:build unix

package main

import (
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/flightlock/flightlock/internal/redistest"
)

// BenchmarkStartup is the time from the start of flightlock to that of CMD, over three nodes that are that
// far away.
func BenchmarkStartup(b *testing.B) {
	bin := b.TempDir() + "/flightlock"
	build := exec.Command("go", "build", "-o", bin, ".")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	var proxies []*redistest.Proxy
	var addrs []string
	for range 3 {
		s := redistest.StartServer(b)
		redistest.Deploy(b, s.Client(b))
		p := redistest.StartProxy(b, s.Addr())
		proxies, addrs = append(proxies, p), append(addrs, p.Addr())
	}
	for _, trip := range []time.Duration{0, 100 * time.Millisecond, 200 * time.Millisecond} {
		b.Run(fmt.Sprintf("roundtrip=%v", trip), func(b *testing.B) {
			for _, p := range proxies {
				p.SetDelay(trip) // of the replies
			}
			var took time.Duration
			for b.Loop() {
				begin := time.Now()
				out, err := exec.Command(bin, "run", "-redis", strings.Join(addrs, ","), "-key", "job", "--",
					"date", "+%s%N").Output()
				if err != nil {
					b.Fatal(err)
				}
				began, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
				if err != nil {
					b.Fatal(err)
				}
				took += time.Unix(0, began).Sub(begin)
			}
			b.ReportMetric(float64(took.Milliseconds())/float64(b.N), "ms-to-CMD")
		})
	}
}
