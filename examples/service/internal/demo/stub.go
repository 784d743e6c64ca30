// Package demo stands for the one that plays the demo, until that is there.
package demo

import (
	"context"
	"flag"
)

// Config is what the demo's flags say.
type Config struct{}

// Flags defines the demo's flags.
func Flags(*flag.FlagSet) *Config { return &Config{} }

// Main plays the demo and returns the exit code.
func Main(context.Context, *Config) int { return 1 }
