package check

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"time"
)

// Panel is what a panel of the Grafana dashboard shows, and where.
type Panel struct {
	Type, Title, Description string
	GridPos                  struct{ H, W, X, Y int }
	FieldConfig              struct {
		Defaults struct {
			Unit   string
			Custom struct{ Stacking struct{ Mode string } }
		}
	}
	Targets []struct{ Expr, LegendFormat string }
}

// Board reads the panels of a dashboard.
func Board(file string) ([]Panel, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var board struct{ Panels []Panel }
	err = json.Unmarshal(data, &board)
	return board.Panels, err
}

var variable = regexp.MustCompile(`\$[a-z]+`)

// Expr is a query of a panel as Grafana sends it, with all jobs and instances chosen.
func Expr(query string, rateInterval time.Duration) string {
	query = strings.ReplaceAll(query, "$__rate_interval", rateInterval.String())
	return variable.ReplaceAllString(query, ".*")
}
