package errtext

import (
	"errors"
	"fmt"
	"testing"
)

func TestWithin(t *testing.T) {
	inner := errors.New("pkg: inner")
	err := fmt.Errorf("pkg: outer: %w", Within("pkg", inner))
	if err.Error() != "pkg: outer: inner" || !errors.Is(err, inner) {
		t.Error(err)
	}
	if other := errors.New("other: inner"); Within("pkg", other).Error() != other.Error() {
		t.Error("the name of another package is kept")
	}
}
