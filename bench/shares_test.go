package main

import (
	"math"
	"slices"
	"testing"
	"time"
)

// Shares are those of processes where there are some, and of clients where all are in one.
func TestSharesAreByProcessOrByClient(t *testing.T) {
	clients := []clientOutcome{
		{Proc: 0, Locks: 10, Held: 1 * time.Second, LongestWait: 3, Commands: 4, Handoffs: 5},
		{Proc: 1, Locks: 20, Held: 2 * time.Second, LongestWait: 9},
		{Proc: 1, Locks: 10, Held: 1 * time.Second, LongestWait: 7, Polling: true},
	}
	got := sharesOf(clients, true)
	want := []shareFigures{
		{Name: "process 0", Clients: 1, Locks: 10, ShareOfLocks: 0.25,
			Held: 1 * time.Second, ShareOfHolding: 0.25, LongestWait: 3, Commands: 4, Handoffs: 5},
		{Name: "process 1", Clients: 2, Polling: 1, Locks: 30, ShareOfLocks: 0.75,
			Held: 3 * time.Second, ShareOfHolding: 0.75, LongestWait: 9},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got := sharesOf(clients, false); len(got) != 3 || got[2].Name != "client 2" ||
		got[2].ShareOfHolding != 0.25 {
		t.Errorf("by client: %+v", got)
	}
	if got := sharesOf([]clientOutcome{{}}, false); got[0].ShareOfHolding != 0 || got[0].ShareOfLocks != 0 {
		t.Errorf("where nobody got anything: %+v", got)
	}
}

func TestJainIsOneWhereAllAreEqual(t *testing.T) {
	held := func(all ...time.Duration) (s []shareFigures) {
		for _, d := range all {
			s = append(s, shareFigures{Held: d})
		}
		return s
	}
	tests := []struct {
		shares []shareFigures
		want   float64
	}{
		{held(time.Second, time.Second, time.Second), 1},
		{held(time.Hour, 0, 0, 0), 0.25},
		{held(1*time.Second, 3*time.Second), 0.8},
		{held(0, 0), 0},
		{nil, 0},
	}
	for _, tt := range tests {
		if got := jain(tt.shares); math.Abs(got-tt.want) > 1e-9 {
			t.Errorf("%+v: got %v, want %v", tt.shares, got, tt.want)
		}
	}
}

// Every client is in one process, and as many of them poll as -polling says, whatever the numbers.
func TestClientsAndPollersAreSpreadOverProcesses(t *testing.T) {
	for _, cfg := range []config{
		{clients: 4, procs: 4, polling: 1}, {clients: 7, procs: 3, polling: 3},
		{clients: 5, procs: 2, polling: 5}, {clients: 3, procs: 1},
	} {
		clients, polling := 0, 0
		for i := range cfg.procs {
			c, p := cfg.clientsOf(i)
			if clients, polling = clients+c, polling+p; p > c || c == 0 {
				t.Errorf("%+v: process %d has %d clients, %d of them poll", cfg, i, c, p)
			}
		}
		if clients != cfg.clients || polling != cfg.polling {
			t.Errorf("%+v: %d clients, %d of them poll", cfg, clients, polling)
		}
	}
}
