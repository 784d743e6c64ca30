// Package regressions tests what once happened, to us or to another library. Above each test a line says what
// it was.
package regressions

import (
	"testing"

	"github.com/flightlock/flightlock/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
