package check

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
)

// Phase is a stretch of time, to be marked in each panel.
type Phase struct {
	Title    string
	From, To time.Time
}

// Sizes of a drawing, in pixels.
const (
	column, line    = 50, 27 // of Grafana's grid
	gap             = 6
	left, right     = 52, 8 // of a panel's curves
	top, bottom     = 30, 46
	legendLineWidth = 14
)

var colours = []string{"#1f78c1", "#e0752d", "#629e51", "#e24d42", "#ba43a9", "#cca300", "#508642", "#705da0"}

// Draw is the dashboard as an SVG: its panels where Grafana has them, each query evaluated on s.
// The values between from and to are step apart, and $__rate_interval is rate.
func Draw(panels []Panel, s *Store, phases []Phase, from, to time.Time, step,
	rate time.Duration) (string, error) {
	var b strings.Builder
	depth := 0
	for _, p := range panels {
		depth = max(depth, p.GridPos.Y+p.GridPos.H)
		if p.Type == "row" {
			fmt.Fprintf(&b, `<text x="%d" y="%d" class="row">%s</text>`+"\n", p.GridPos.X*column+gap,
				p.GridPos.Y*line+19, html.EscapeString(p.Title))
			continue
		}
		c := canvas{b: &b, from: from, to: to,
			x: float64(p.GridPos.X*column + left), y: float64(p.GridPos.Y*line + top),
			w: float64(p.GridPos.W*column - left - right - gap), h: float64(p.GridPos.H*line - top - bottom - gap)}
		for _, t := range p.Targets {
			m, err := s.Range(Expr(t.Expr, rate), from, to, step)
			if err != nil {
				return "", fmt.Errorf("%s: %w", p.Title, err)
			}
			c.add(m, t.LegendFormat)
		}
		c.panel(p, phases)
	}
	height := depth*line + 24*(len(phases)+1)/2 + 16
	head := fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d"`+
		` font-family="sans-serif" font-size="10">
<style>.row{font-size:14px;font-weight:bold}.title{font-size:12px;font-weight:bold}.axis{fill:#666}</style>
<rect width="100%%" height="100%%" fill="#f4f5f5"/>
`, 24*column, height)
	for i, p := range phases {
		fmt.Fprintf(&b, `<text x="%d" y="%d" font-size="13"><tspan font-weight="bold">%d</tspan>  %s</text>`+"\n",
			gap+i%2*12*column, depth*line+24*(1+i/2), i+1, html.EscapeString(p.Title))
	}
	return head + b.String() + "</svg>\n", nil
}

// canvas is where the curves of one panel go.
type canvas struct {
	b          *strings.Builder
	from, to   time.Time
	x, y, w, h float64
	curves     []curve
}

// curve is one series; NaN where it has no value.
type curve struct {
	name string
	t    []time.Time
	v    []float64
}

// add takes the series that have a value at all.
func (c *canvas) add(m promql.Matrix, legend string) {
	for _, s := range m {
		k := curve{name: legend}
		s.Metric.Range(func(l labels.Label) { k.name = strings.ReplaceAll(k.name, "{{"+l.Name+"}}", l.Value) })
		some := false
		for _, p := range s.Floats {
			k.t, k.v = append(k.t, time.UnixMilli(p.T)), append(k.v, p.F)
			some = some || !math.IsNaN(p.F)
		}
		if some {
			c.curves = append(c.curves, k)
		}
	}
}

func (c *canvas) panel(p Panel, phases []Phase) {
	frame := func(x, y, w, h float64, fill string) {
		fmt.Fprintf(c.b, `<rect x="%.0f" y="%.0f" width="%.0f" height="%.0f" fill="%s"/>`+"\n", x, y, w, h, fill)
	}
	frame(c.x-left+gap/2, c.y-top+gap/2, c.w+left+right, c.h+top+bottom, "#fff")
	fmt.Fprintf(c.b, `<text x="%.0f" y="%.0f" class="title">%s</text>`+"\n", c.x-left+2*gap, c.y-top+18,
		html.EscapeString(p.Title))
	for i, ph := range phases {
		x0, x1 := c.at(ph.From), c.at(ph.To)
		if i%2 == 1 {
			frame(x0, c.y, x1-x0, c.h, "#f0f0f0")
		}
		fmt.Fprintf(c.b, `<text x="%.0f" y="%.0f" class="axis" text-anchor="middle">%d</text>`+"\n", (x0+x1)/2,
			c.y-2, i+1)
	}
	stacked := p.FieldConfig.Defaults.Custom.Stacking.Mode == "normal"
	below := map[int64]float64{} // the sum of the curves so far, by time
	most := 0.0
	for _, k := range c.curves {
		for j, v := range k.v {
			if at := k.t[j].UnixMilli(); stacked && !math.IsNaN(v) {
				k.v[j] += below[at]
				below[at] = k.v[j]
			}
			if !math.IsNaN(v) {
				most = max(most, k.v[j])
			}
		}
	}
	scale, ticks := axis(most)
	for _, v := range ticks {
		y := c.y + c.h*(1-v/scale)
		fmt.Fprintf(c.b,
			`<path d="M%.0f %.1fh%.0f" stroke="#ddd"/><text x="%.0f" y="%.1f" class="axis" `+
				`text-anchor="end">%s</text>`+"\n",
			c.x, y, c.w, c.x-4, y+3, inUnit(v, p.FieldConfig.Defaults.Unit))
	}
	for i, k := range slices.Backward(c.curves) { // the topmost of a stack lies behind
		for from := 0; from < len(k.v); from++ { // nothing is drawn where there is no value
			to := from
			for to < len(k.v) && !math.IsNaN(k.v[to]) {
				to++
			}
			c.stretch(k.t[from:to], k.v[from:to], scale, colours[i%len(colours)], stacked)
			from = to
		}
	}
	x, y := c.x-left/2, c.y+c.h+22
	for i, k := range c.curves {
		width := legendLineWidth + 10 + 5.4*float64(len(k.name))
		if x+width > c.x+c.w+right && y < c.y+c.h+30 {
			x, y = c.x-left/2, y+13
		}
		fmt.Fprintf(c.b,
			`<path d="M%.0f %.0fh10" stroke="%s" stroke-width="3"/><text x="%.0f" y="%.0f">%s</text>`+"\n",
			x, y, colours[i%len(colours)], x+legendLineWidth, y+3, html.EscapeString(k.name))
		x += width
	}
	for t := time.Duration(0); t <= c.to.Sub(c.from); t += 10 * time.Second {
		fmt.Fprintf(c.b, `<text x="%.0f" y="%.0f" class="axis" text-anchor="middle">%.0fs</text>`+"\n",
			c.at(c.from.Add(t)), c.y+c.h+11, t.Seconds())
	}
}

// at is where a time is.
func (c *canvas) at(t time.Time) float64 {
	return c.x + c.w*float64(t.Sub(c.from))/float64(c.to.Sub(c.from))
}

func (c *canvas) stretch(t []time.Time, v []float64, scale float64, colour string, filled bool) {
	if len(t) == 0 {
		return
	}
	var d strings.Builder
	for i := range t {
		fmt.Fprintf(&d, "%c%.1f %.1f", "ML"[min(i, 1)], c.at(t[i]), c.y+c.h*(1-v[i]/scale))
	}
	if filled {
		fmt.Fprintf(c.b, `<path d="%sV%.1fH%.1fZ" fill="%s"/>`+"\n", d.String(), c.y+c.h, c.at(t[0]), paler(colour))
	}
	fmt.Fprintf(c.b, `<path d="%s" fill="none" stroke="%s" stroke-width="1.4" stroke-linecap="round"/>`+"\n",
		d.String(), colour)
}

// paler is a colour mixed with white.
func paler(colour string) string {
	rgb, _ := strconv.ParseUint(colour[1:], 16, 32)
	mixed := uint64(0)
	for shift := 0; shift < 24; shift += 8 {
		mixed |= (255 - (255-rgb>>shift&255)*4/10) << shift
	}
	return fmt.Sprintf("#%06x", mixed)
}

// axis is a round end of an axis for values up to most, and where its lines go.
func axis(most float64) (end float64, ticks []float64) {
	if most == 0 {
		most = 1
	}
	step := math.Pow(10, math.Floor(math.Log10(most)))
	for _, part := range []float64{5, 2, 1, 0.5} {
		if most/(step/part) <= 5 {
			step /= part
			break
		}
	}
	for i := 0; float64(i-1)*step < most; i++ {
		ticks = append(ticks, float64(i)*step)
	}
	return ticks[len(ticks)-1], ticks
}

// inUnit is a value as Grafana shows it.
func inUnit(v float64, unit string) string {
	switch {
	case v == 0:
		return "0"
	case unit == "s" && v < 1e-3:
		return short(v*1e6) + " us"
	case unit == "s" && v < 1:
		return short(v*1e3) + " ms"
	case unit == "s":
		return short(v) + " s"
	case v >= 1000:
		return short(v/1000) + "k"
	}
	return short(v)
}

func short(v float64) string { return strconv.FormatFloat(v, 'g', 3, 64) }
