package main

import (
	"cmp"
	"image/color"
	"math"
	"path/filepath"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// chart is one plot: a line for each rival.
type chart struct {
	file, title, x, y string
	points            func(s summary, rival string) plotter.XYs
	ticks             []plot.Tick // of x
	logX              bool
}

var plots = []chart{
	{file: "latency.svg", title: "Wait for a hot key, 2,000 arrivals/s, 20 µs of work, 1 node",
		x: "percentile", y: "wait", points: latencyPoints, ticks: percentileTicks(), logX: true},
	{file: "goroutines.svg", title: "One hot key, one process, 1 node", x: "goroutines", y: "locks/s",
		logX: true,
		points: byBout(func(b bout) (float64, bool) {
			return float64(b.Load.Goroutines), b.Nodes == 1 && b.Load.Work == 0 &&
				(b.Group == "hot key" || b.Group == "hot key by goroutines")
		}), ticks: numberTicks(1, 10, 100, 1000)},
	{file: "nodes.svg", title: "A key for each of 1,000 goroutines", x: "nodes", y: "locks/s",
		ticks:  numberTicks(1, 3, 5),
		points: byBout(func(b bout) (float64, bool) { return float64(b.Nodes), b.Group == "distinct keys" })},
	{file: "roundtrip.svg", title: "One hot key, 1,000 goroutines, 1 node", x: "round trip added, ms",
		y:     "locks/s",
		ticks: numberTicks(0, 0.2, 1, 5),
		points: byBout(func(b bout) (float64, bool) {
			return b.RTT.Seconds() * 1000, b.Group == "round trip, hot key"
		})},
	{file: "roundtrip-uncontended.svg", title: "No contention, 1 goroutine, 1 node",
		x: "round trip added, ms", y: "locks/s",
		ticks: numberTicks(0, 0.2, 1, 5),
		points: byBout(func(b bout) (float64, bool) {
			return b.RTT.Seconds() * 1000, b.Group == "round trip, uncontended"
		})},
}

// styles of the rivals: a palette that the colour-blind can tell apart (Okabe and Ito), and shapes.
var styles = map[string]struct {
	color color.Color
	shape draw.GlyphDrawer
	width vg.Length
}{
	nameOurs:      {color.RGBA{R: 213, G: 94, A: 255}, draw.CircleGlyph{}, vg.Points(2.5)},
	nameRedsync:   {color.RGBA{G: 114, B: 178, A: 255}, draw.SquareGlyph{}, vg.Points(1.2)},
	nameFailFast:  {color.RGBA{R: 86, G: 180, B: 233, A: 255}, draw.TriangleGlyph{}, vg.Points(1.2)},
	nameRedislock: {color.RGBA{G: 158, B: 115, A: 255}, draw.PyramidGlyph{}, vg.Points(1.2)},
	nameRueidis:   {color.RGBA{R: 204, G: 121, B: 167, A: 255}, draw.BoxGlyph{}, vg.Points(1.2)},
	nameByHand:    {color.RGBA{R: 120, G: 120, B: 120, A: 255}, draw.CrossGlyph{}, vg.Points(1.2)},
}

// writePlots writes those that something was measured for.
func writePlots(dir string, s summary) error {
	for _, c := range plots {
		p, some, err := c.draw(s)
		if err != nil {
			return err
		}
		if !some {
			continue
		}
		if err := p.Save(7*vg.Inch, 4.2*vg.Inch, filepath.Join(dir, c.file)); err != nil {
			return err
		}
	}
	return nil
}

func (c chart) draw(s summary) (p *plot.Plot, some bool, err error) {
	p = plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = c.title, c.x, c.y
	p.BackgroundColor = color.White
	p.X.Tick.Marker = plot.ConstantTicks(c.ticks)
	if c.logX {
		p.X.Scale = plot.LogScale{}
	}
	p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, decades{time: c.y == "wait"}
	p.Legend.Top = true
	p.Legend.Padding = vg.Points(1)
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = color.Gray{Y: 225}, color.Gray{Y: 225}
	p.Add(grid)
	for _, name := range withByHand {
		points := c.points(s, name)
		if len(points) == 0 {
			continue
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, false, err
		}
		style := styles[name]
		line.Color, line.Width = style.color, style.width
		dots.Color, dots.Shape, dots.Radius = style.color, style.shape, vg.Points(3)
		p.Add(line, dots)
		p.Legend.Add(name, line, dots)
		some = true
	}
	if c.logX { // room for the legend
		p.X.Max *= math.Pow(p.X.Max/p.X.Min, 0.35)
	} else {
		p.X.Max += 0.35 * (p.X.Max - p.X.Min)
	}
	return p, some, nil
}

// byBout makes a point of each bout that x gives a place.
func byBout(x func(bout) (float64, bool)) func(summary, string) plotter.XYs {
	return func(s summary, rival string) (points plotter.XYs) {
		for _, b := range allBouts(fullPace) {
			at, ok := x(b)
			y := s.get(b.id(), rival, "locks_s")
			if ok && y > 0 {
				points = append(points, plotter.XY{X: at, Y: y})
			}
		}
		sortByX(points)
		return points
	}
}

// latencyPoints stretches the percentiles towards 100: each nine is as wide as the one before.
func latencyPoints(s summary, rival string) (points plotter.XYs) {
	m := s[openHot][rival]
	if m == nil || m.waits == nil {
		return nil
	}
	for i, q := range quantiles {
		if q < 1 && m.waits[i] > 0 {
			points = append(points, plotter.XY{X: 1 / (1 - q), Y: m.waits[i]})
		}
	}
	return points
}

func percentileTicks() (ticks []plot.Tick) {
	for _, q := range []float64{0, 0.5, 0.9, 0.99, 0.999} {
		ticks = append(ticks, plot.Tick{Value: 1 / (1 - q), Label: strconv.FormatFloat(100*q, 'g', -1, 64)})
	}
	return ticks
}

func numberTicks(values ...float64) (ticks []plot.Tick) {
	for _, v := range values {
		ticks = append(ticks, plot.Tick{Value: v, Label: strconv.FormatFloat(v, 'g', -1, 64)})
	}
	return ticks
}

// decades are ticks at powers of ten, labelled as numbers or as microseconds.
type decades struct{ time bool }

func (d decades) Ticks(low, high float64) (ticks []plot.Tick) {
	for e := math.Floor(math.Log10(low)); e <= math.Ceil(math.Log10(high)); e++ {
		v := math.Pow(10, e)
		label := thousands(int64(v))
		if d.time {
			label = span(v)
		}
		ticks = append(ticks, plot.Tick{Value: v, Label: label})
	}
	return ticks
}

func sortByX(points plotter.XYs) {
	slices.SortFunc(points, func(a, b plotter.XY) int { return cmp.Compare(a.X, b.X) })
}
