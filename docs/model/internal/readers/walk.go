package readers

import "math/rand/v2"

// Walk takes so many steps by chance, and returns the first violation.
func (m *Model) Walk(r *rand.Rand, steps int) error {
	s := new(State)
	for range steps {
		a := r.IntN(m.actions())
		if r.IntN(8) == 0 {
			a = r.IntN(1 + 2*processes) // else nearly all would be arrivals
		}
		if m.step(s, a) {
			if err := s.violation(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Explore tries all actions in all states that can be reached in so many steps. It returns how many states
// there are, and the first violation.
func (m *Model) Explore(steps int) (states int, err error) {
	seen, front := map[State]bool{{}: true}, []State{{}}
	for range steps {
		var next []State
		for _, s := range front {
			for a := range m.actions() {
				after := s
				if !m.step(&after, a) || seen[after] {
					continue
				}
				if err := after.violation(); err != nil {
					return len(seen), err
				}
				seen[after] = true
				next = append(next, after)
			}
		}
		front = next
	}
	return len(seen), nil
}
