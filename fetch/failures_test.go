package fetch

import (
	"errors"
	"strconv"
	"testing"
	"time"
)

// However many keys fail, and for however long their errors are held, the number of records is bounded; the latest are
// kept, and that of a key that was loaded since is removed.
func TestFailuresAreBounded(t *testing.T) {
	errTest := errors.New("failed")
	fs, now := failures{hold: time.Hour, keys: map[string]*failure{}}, time.Now()
	key := strconv.Itoa
	for i := range maxFailures + 100 {
		fs.failed(key(i), "", errTest, now)
	}
	fs.failed(key(100), "", errTest, now) // the oldest, again
	fs.failed("last", "", errTest, now)
	if n := len(fs.keys); n != maxFailures || fs.order.Len() != n {
		t.Errorf("%d records, %d in order", n, fs.order.Len())
	}
	for k, held := range map[string]bool{key(99): false, key(100): true, key(101): false, key(102): true, "last": true} {
		if err, _ := fs.of(k, "", now.Add(time.Minute)); (err != nil) != held {
			t.Errorf("%s: %v", k, err)
		}
	}
	fs.succeeded("last")
	if err, _ := fs.of("last", "", now); err != nil || len(fs.keys) != maxFailures-1 || fs.order.Len() != maxFailures-1 {
		t.Errorf("%v, %d records", err, len(fs.keys))
	}
}

// An error is held for those who found the same entry, or none; hold is how long, and 0 is never. After each kind of
// failure a refresh has to wait.
func TestWhatIsHeldForWhom(t *testing.T) {
	errTest, now := errors.New("failed"), time.Now()
	for _, c := range []struct {
		hold             time.Duration
		noted, found     string
		after            time.Duration
		held, known      bool
		refreshAllowedIn time.Duration
	}{
		{time.Minute, "s", "s", 0, true, true, time.Minute},
		{time.Minute, "s", "", 59 * time.Second, true, true, time.Minute},
		{time.Minute, "", "s", 0, true, false, time.Minute},
		{time.Minute, "s", "t", 0, false, false, time.Minute},
		{time.Minute, "s", "s", time.Minute, false, false, time.Minute},
		{time.Millisecond, "s", "s", 2 * time.Millisecond, false, false, time.Second},
		{-1, "s", "s", 0, false, false, time.Second},
	} {
		fs := failures{hold: c.hold, keys: map[string]*failure{}}
		fs.failed("k", c.noted, errTest, now)
		err, known := fs.of("k", c.found, now.Add(c.after))
		var held *HeldError
		if errors.As(err, &held) != c.held || known != c.known || c.held && !errors.Is(err, errTest) {
			t.Errorf("%+v: %v, %v", c, err, known)
		}
		if fs.allowRefresh("k", now.Add(c.refreshAllowedIn-time.Millisecond)) ||
			!fs.allowRefresh("k", now.Add(c.refreshAllowedIn)) {
			t.Errorf("%+v: refresh", c)
		}
		fs.failed("k", "", nil, now)
		if err, _ := fs.of("k", c.found, now); err != nil || fs.allowRefresh("k", now) {
			t.Errorf("loaded and not stored: %v", err)
		}
	}
	fs := failures{keys: map[string]*failure{}}
	if fs.inUse("k", now); fs.allowRefresh("k", now) || !fs.allowRefresh("k", now.Add(usePause)) {
		t.Error("in use")
	}
}
