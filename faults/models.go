//go:build linux

package main

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// This file is the specification: the behavior of a lock and of a fenced register, for porcupine to
// find out whether some order of the operations, each at one moment between its call and its
// return, explains the whole history.

// lockOp acquires a lock, or releases it.
type lockOp struct {
	take  bool
	id    int // of the hold; two holds of one holder are two
	fence int64
}

type lockState struct {
	holder int // 0: nobody
	fence  int64
}

// lockModel is a lock with tokens: held by one at a time, each with a larger token.
var lockModel = porcupine.Model{
	Init: func() any { return lockState{} },
	Step: func(state, input, _ any) (bool, any) {
		s, op := state.(lockState), input.(lockOp)
		if op.take {
			return s.holder == 0 && op.fence > s.fence, lockState{op.id, op.fence}
		}
		return s.holder == op.id, lockState{0, s.fence}
	},
	DescribeOperation: func(input, _ any) string { return fmt.Sprintf("%+v", input) },
}

// lockOps are the operations on one key's lock. Failed tries had no visible effect: one that was
// undone belongs to nobody.
func lockOps(holds []hold) (ops []porcupine.Operation) {
	for i, h := range holds {
		if !h.granted() {
			continue
		}
		ops = append(ops,
			porcupine.Operation{ClientId: h.Proc, Input: lockOp{true, i + 1, h.Fence}, Call: h.Asked,
				Return: h.start()},
			porcupine.Operation{ClientId: h.Proc, Input: lockOp{false, i + 1, h.Fence}, Call: max(h.end(), h.start()),
				Return: h.gone()})
	}
	return ops
}

type registerState struct {
	fence int64
	value int
}

// registerModel is a value that refuses tokens smaller than the largest it has seen, in reads and
// writes. No acknowledged write is lost: a read returns the last value written.
var registerModel = porcupine.Model{
	Init: func() any { return registerState{} },
	Step: func(state, input, _ any) (bool, any) {
		s, a := state.(registerState), input.(access)
		refused := a.Fence < s.fence
		switch {
		case !a.Unknown && a.Stale != refused:
			return false, s
		case refused:
			return true, s
		case a.Set:
			return true, registerState{a.Fence, a.Value}
		}
		return a.Unknown || a.Value == s.value, registerState{a.Fence, s.value}
	},
	DescribeOperation: func(input, _ any) string { return fmt.Sprintf("%+v", input) },
}

func registerOps(accesses []access) (ops []porcupine.Operation) {
	for _, a := range accesses {
		if a.Unknown {
			a.Return = math.MaxInt64
		}
		ops = append(ops, porcupine.Operation{ClientId: a.Proc, Input: a, Call: a.Call, Return: a.Return})
	}
	return ops
}

// checkTime is how long porcupine may take for one key. It needs milliseconds.
const checkTime = 2 * time.Minute

// notLinearizable returns the keys whose histories no order explains, by key and kind.
func (h *history) notLinearizable() (found []string) {
	check := func(kind, key string, m porcupine.Model, ops []porcupine.Operation) {
		if got := porcupine.CheckOperationsTimeout(m, ops, checkTime); got != porcupine.Ok {
			found = append(found, fmt.Sprintf("the %s of %q is not linearizable: porcupine says %s of %d operations",
				kind, key, got, len(ops)))
		}
	}
	for key, holds := range byKey(h.holds, func(h hold) string { return h.Key }) {
		check("lock", key, lockModel, lockOps(holds))
	}
	for key, accesses := range byKey(h.accesses, func(a access) string { return a.Key }) {
		check("register", key, registerModel, registerOps(accesses))
	}
	slices.Sort(found)
	return found
}

func byKey[T any](all []T, key func(T) string) map[string][]T {
	parts := map[string][]T{}
	for _, x := range all {
		parts[key(x)] = append(parts[key(x)], x)
	}
	return parts
}
