package sim

import (
	"math/rand/v2"
	"time"
)

// options are those that the processes of a service need not have in common, as during a deploy.
type options struct {
	nodeTimeout, slice, linger time.Duration
	notify                     bool
}

// addVariety has processes with different options, more processes and nodes, refused subscriptions and
// Fetchers, each in some worlds.
func (p *plan) addVariety(r *rand.Rand) {
	p.addProcesses(r)
	p.addNodes(r)
	if r.IntN(3) == 0 {
		p.addOptions(r)
	}
	if r.IntN(6) == 0 {
		p.drift = pick(r, 0, 0.2, 0.45)
		for i, rate := range p.rates {
			if rate != 1 {
				p.rates[i] = 1 + (2*r.Float64()-1)*p.drift*0.98
			}
		}
	}
	if r.IntN(6) == 0 {
		for range p.clients {
			deaf := make([]bool, p.nodes)
			for s := range deaf {
				deaf[s] = r.IntN(3) == 0
			}
			p.deaf = append(p.deaf, deaf)
		}
	}
	p.fetches = p.copies == 0 && r.IntN(3) == 0
}

// addProcesses has more processes than usual that want one key, in some worlds.
func (p *plan) addProcesses(r *rand.Rand) {
	if r.IntN(4) != 0 || p.keys > 1 {
		return
	}
	p.clients += pick(r, 1, 2, 4)
	if p.clients > 4 {
		p.workers = max(1, p.workers-1)
	}
	for p.mute != nil && len(p.mute) < p.clients {
		p.mute = append(p.mute, r.IntN(2) == 0)
	}
}

// addNodes has more nodes than usual, also even numbers of them, in some worlds. Those that are added have no
// faults of their own.
func (p *plan) addNodes(r *rand.Rand) {
	if r.IntN(6) != 0 {
		return
	}
	for p.nodes = max(p.nodes, pick(r, 4, 6, 7)); len(p.rates) < p.nodes; {
		p.offsets, p.rates = append(p.offsets, p.offsets[0]), append(p.rates, 1)
	}
	p.quarantine = p.quarantine || p.forgets // with one or two nodes there is none
}

// addOptions has the processes differ in what each may set for itself.
func (p *plan) addOptions(r *rand.Rand) {
	for range p.clients {
		o := p.optionsOf(0)
		if r.IntN(2) == 0 {
			o.nodeTimeout = between(r, 5*time.Millisecond, p.nodeTimeout)
		}
		if r.IntN(2) == 0 {
			o.slice = pick(r, -1, 5*time.Millisecond, 20*time.Millisecond, 100*time.Millisecond)
		}
		if r.IntN(2) == 0 {
			o.linger = pick(r, 0, between(r, time.Millisecond, time.Second))
		}
		if r.IntN(3) == 0 {
			o.notify = !o.notify
		}
		p.own = append(p.own, o)
	}
}

// optionsOf are those of the process in that slot.
func (p *plan) optionsOf(slot int) options {
	if slot < len(p.own) {
		return p.own[slot]
	}
	return options{
		nodeTimeout: p.nodeTimeout, slice: p.slice, linger: p.linger, notify: p.notify,
	}
}
