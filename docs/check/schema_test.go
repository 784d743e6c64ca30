package check

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/build"
	"go/constant"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
)

const boardFile = "../grafana/flightlock.json"

// The dashboard is one that Grafana's published schema allows.
func TestDashboardHasGrafanasSchema(t *testing.T) {
	data, err := os.ReadFile(boardFile)
	if err != nil {
		t.Fatal(err)
	}
	if err := checkSchema(data); err != nil {
		t.Fatal(err)
	}
}

// checkSchema reports each kind of mistake.
func TestSchemaNoticesMistakes(t *testing.T) {
	data, err := os.ReadFile(boardFile)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ old, new, says string }{
		"a field of the dashboard":    {`"refresh": "30s"`, `"refreshes": "30s"`, "refreshes"},
		"a field of a panel":          {`"gridPos": {`, `"grid": {}, "gridPos": {`, "grid"},
		"an option of the panel type": {`"showLegend": true`, `"showLegends": true`, "showLegends"},
		"a field of the lines":        {`"lineWidth": 1`, `"lineWidths": 1`, "lineWidths"},
		"a field of a query":          {`"legendFormat"`, `"legend"`, "legend"},
		"a type":                      {`"lineWidth": 1`, `"lineWidth": "1"`, "lineWidth"},
		"a required field":            {`"placement": "bottom",`, ``, "placement"},
		"a string of an enumeration":  {`"placement": "bottom"`, `"placement": "below"`, "below is no"},
		"a number of an enumeration":  {`"graphTooltip": 1`, `"graphTooltip": 7`, "7 is no"},
		"a style of lines":            {`"drawStyle": "line"`, `"drawStyle": "dots"`, "dots is no"},
		"a type of panels":            {`"type": "timeseries"`, `"type": "timeserie"`, `"timeserie"`},
		"a unit":                      {`"unit": "s"`, `"unit": "seconds"`, `"seconds"`},
		"a type of data sources":      {`"type": "prometheus"`, `"type": "prometeus"`, "not of Prometheus"},
		"an id":                       {`"id": 3,`, `"id": 2,`, "has the id 2"},
		"a place":                     {`"x": 8,`, `"x": 7,`, "overlaps"},
		"a width":                     {`"x": 16,`, `"x": 17,`, "of 24"},
		"a variable":                  {`$instance`, `$instances`, "no variable $instances"},
	} {
		t.Run(name, func(t *testing.T) {
			if !strings.Contains(string(data), c.old) {
				t.Fatalf("the dashboard has no %s", c.old)
			}
			err := checkSchema([]byte(strings.Replace(string(data), c.old, c.new, 1)))
			if name == "a type of data sources" { // the first one is that of the panel, which may be any
				err = checkSchema([]byte(strings.ReplaceAll(string(data), c.old, c.new)))
			}
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("%s instead of %s: %v", c.new, c.old, err)
			}
		})
	}
}

// sdk is the import path below which the packages of Grafana's published schema are.
const sdk = "github.com/grafana/grafana-foundation-sdk/go/"

// checkSchema holds the JSON of a dashboard against Grafana's published schema, as its Foundation
// SDK has it: fields that do not exist, have another type or are missing, in the dashboard, in
// the options and fields of each panel type, and in the queries. The SDK decodes the values of an
// enumeration as plain strings and numbers, so these and the units are compared with its
// constants. Then follows what Grafana requires and the schema cannot express: unique ids, panels
// within the 24 columns that do not overlap, and variables that exist.
func checkSchema(data []byte) error {
	plugins.RegisterDefaultPlugins()
	// Without errors, strict decoding returns an empty list of them and an incomplete dashboard.
	var d, incomplete dashboard.Dashboard
	err := incomplete.UnmarshalJSONStrict(data)
	if none, ok := err.(cog.BuildErrors); err != nil && !(ok && len(none) == 0) {
		return err
	}
	if err := json.Unmarshal(data, &d); err != nil {
		return err
	}
	if err := d.Validate(); err != nil {
		return err
	}
	s := schema{constants: map[string]map[string]bool{}}
	s.walk("dashboard", reflect.ValueOf(d))
	s.panels(d)
	s.variables(d, data)
	return errors.Join(s.errs...)
}

// schema collects what is wrong with a dashboard.
type schema struct {
	constants map[string]map[string]bool // by package and type: the values of its constants
	errs      []error
}

func (s *schema) fail(format string, args ...any) {
	s.errs = append(s.errs, fmt.Errorf(format, args...))
}

// walk compares each value below v whose type has constants in the SDK with them.
func (s *schema) walk(where string, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			s.walk(where, v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			s.walk(where+"."+v.Type().Field(i).Name, v.Field(i))
		}
	case reflect.Slice:
		for i := range v.Len() {
			s.walk(where+"["+strconv.Itoa(i)+"]", v.Index(i))
		}
	case reflect.Map:
		for it := v.MapRange(); it.Next(); {
			s.walk(fmt.Sprintf("%s[%v]", where, it.Key()), it.Value())
		}
	case reflect.String, reflect.Int64:
		if known := s.constantsOf(v.Type().PkgPath(), v.Type().Name()); len(known) > 0 && !known[fmt.Sprint(v)] {
			s.fail("%s: %v is no %v", where, v, v.Type())
		}
	}
}

// constantsOf returns the values of the constants that a package of the SDK declares with a type.
func (s *schema) constantsOf(pkg, typ string) map[string]bool {
	if !strings.HasPrefix(pkg, sdk) {
		return nil
	}
	if s.constants[pkg+".read"] == nil {
		s.constants[pkg+".read"] = map[string]bool{"": true}
		if err := s.readConstants(pkg); err != nil {
			s.fail("%s: %v", pkg, err)
		}
	}
	return s.constants[pkg+"."+typ]
}

func (s *schema) readConstants(pkg string) error {
	found, err := build.Import(pkg, ".", 0)
	if err != nil {
		return err
	}
	for _, name := range found.GoFiles {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(found.Dir, name), nil,
			parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if spec, ok := n.(*ast.ValueSpec); ok {
				s.addConstants(pkg, spec)
			}
			return true
		})
	}
	return nil
}

func (s *schema) addConstants(pkg string, spec *ast.ValueSpec) {
	typ := ""
	if id, ok := spec.Type.(*ast.Ident); ok {
		typ = id.Name
	}
	for _, value := range spec.Values {
		lit, ok := value.(*ast.BasicLit)
		if !ok {
			continue
		}
		text := constant.MakeFromLiteral(lit.Value, lit.Kind, 0).ExactString()
		if lit.Kind == token.STRING {
			text, _ = strconv.Unquote(lit.Value)
		}
		if s.constants[pkg+"."+typ] == nil {
			s.constants[pkg+"."+typ] = map[string]bool{}
		}
		s.constants[pkg+"."+typ][text] = true
	}
}

// panels checks the ids, places, types, units and queries of the panels.
func (s *schema) panels(d dashboard.Dashboard) {
	ids := map[uint32]string{}
	taken := map[[2]uint32]string{} // by column and line
	place := func(id *uint32, title *string, pos *dashboard.GridPos) string {
		name := "panel without a title"
		if title != nil {
			name = *title
		}
		if id == nil || pos == nil {
			s.fail("%s: no id or no gridPos", name)
			return name
		}
		if other, there := ids[*id]; there {
			s.fail("%s: has the id %d of %s", name, *id, other)
		}
		ids[*id] = name
		if pos.X+pos.W > 24 {
			s.fail("%s: columns %d to %d of 24", name, pos.X, pos.X+pos.W)
		}
		overlaps := map[string]bool{}
		for x := pos.X; x < pos.X+pos.W; x++ {
			for y := pos.Y; y < pos.Y+pos.H; y++ {
				if other, there := taken[[2]uint32{x, y}]; there && !overlaps[other] {
					overlaps[other] = true
					s.fail("%s: overlaps %s", name, other)
				}
				taken[[2]uint32{x, y}] = name
			}
		}
		return name
	}
	for _, p := range d.Panels {
		if p.RowPanel != nil {
			place(&p.RowPanel.Id, p.RowPanel.Title, p.RowPanel.GridPos)
			continue
		}
		name := place(p.Panel.Id, p.Panel.Title, p.Panel.GridPos)
		if _, ok := cog.ConfigForPanelcfgVariant(p.Panel.Type); !ok {
			s.fail("%s: Grafana has no panels of type %q", name, p.Panel.Type)
		}
		s.units(name, p.Panel.FieldConfig)
		refs := map[string]bool{}
		for _, target := range p.Panel.Targets {
			q, ok := target.(*prometheus.Dataquery)
			if !ok {
				s.fail("%s: a query that is not of Prometheus: %T", name, target)
				continue
			}
			if q.RefId == nil || refs[*q.RefId] {
				s.fail("%s: a query without a refId, or two with the same", name)
				continue
			}
			refs[*q.RefId] = true
		}
	}
}

func (s *schema) units(name string, config *dashboard.FieldConfigSource) {
	if config == nil || config.Defaults.Unit == nil {
		return
	}
	if unit := *config.Defaults.Unit; !s.constantsOf(sdk+"units", "")[unit] {
		s.fail("%s: Grafana has no unit %q", name, unit)
	}
}

var used = regexp.MustCompile(`\$\{?(\w+)`)

// variables checks that each variable in the JSON is declared, or one of Grafana's own.
func (s *schema) variables(d dashboard.Dashboard, data []byte) {
	declared := map[string]bool{"__rate_interval": true, "__all": true}
	for _, v := range d.Templating.List {
		declared[v.Name] = true
	}
	for _, m := range used.FindAllSubmatch(data, -1) {
		if !declared[string(m[1])] {
			s.fail("no variable %s", m[0])
			declared[string(m[1])] = true
		}
	}
}
