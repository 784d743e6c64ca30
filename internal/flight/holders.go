package flight

import "time"

// Holders gives, for every Ticket of key that is current, a function that refreshes it, as its
// holder could at any time, and returns its Err after that. It is for tests, which cannot
// wait for time to bring a refresh.
func (g *Group) Holders(key string, timeout time.Duration) (all []func() error) {
	for _, f := range g.all() {
		if f.key != key {
			continue
		}
		f.mu.Lock()
		t := f.cur
		f.mu.Unlock()
		if t == nil {
			continue
		}
		all = append(all, func() error {
			done := make(chan struct{})
			t.Refresh(timeout, func(error) { close(done) })
			<-done
			return t.Err()
		})
	}
	return all
}
