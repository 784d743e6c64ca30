package fetch

import (
	"errors"
	"strconv"
	"testing"
	"time"
)

// However many keys fail, and for however long their errors are held, the number of records is bounded; the
// latest are kept, and that of a key that was loaded since is removed.
func TestFailuresAreBounded(t *testing.T) {
	errTest := errors.New("failed")
	fs, now := failures{hold: time.Hour}, time.Now()
	held := func(i int) bool {
		err, _ := fs.of(strconv.Itoa(i), "", now.Add(time.Minute))
		return err != nil
	}
	for i := range 5*maxFailures + 100 {
		fs.failed(strconv.Itoa(i), "", errTest, now)
		if n := len(fs.new) + len(fs.old); n > 2*maxFailures || !held(max(0, i+1-maxFailures)) || !held(i) {
			t.Fatalf("%d records after %d", n, i)
		}
	}
	if fs.succeeded(strconv.Itoa(4*maxFailures + 200)); held(4*maxFailures+200) || !held(4*maxFailures+201) {
		t.Error("the record of a key that was loaded")
	}
}

// An error is held for those who found the same entry, or none; hold is how long, and 0 is never. After each
// kind of failure a refresh has to wait.
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
		fs := failures{hold: c.hold}
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
	fs := failures{}
	if fs.inUse("k", now); fs.allowRefresh("k", now) || !fs.allowRefresh("k", now.Add(usePause)) {
		t.Error("in use")
	}
}
