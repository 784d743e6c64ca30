package main

import (
	"bytes"
	"testing"
	"time"
)

func TestTableAlignsColumns(t *testing.T) {
	var b bytes.Buffer
	table{{"", "p50"}, {"a", "1.5ms"}, {"longer", "12µs"}}.write(&b)
	want := "            p50\n  a       1.5ms\n  longer   12µs\n"
	if b.String() != want {
		t.Errorf("got\n%q, want\n%q", b.String(), want)
	}
}

func TestFiguresAreReadable(t *testing.T) {
	tests := []struct{ got, want string }{
		{count(0), "0"}, {count(999), "999"}, {count(1000), "1,000"}, {count(1234567), "1,234,567"},
		{number(4000), "4,000"}, {number(4.25), "4.2"},
		{duration(0), "0s"}, {duration(999), "999ns"}, {duration(1234567), "1.23ms"},
		{duration(51449 * time.Microsecond), "51.4ms"}, {duration(1999 * time.Millisecond), "2s"},
		{duration(61 * time.Second), "1m1s"},
		{plural(1, "client"), "1 client"}, {plural(4, "client"), "4 clients"},
		{plural(2, "process", "processes"), "2 processes"},
		{percent(0.25), "25.0%"}, {percent(1), "100.0%"},
		{workText(0), "as fast as they can"}, {workText(20 * time.Microsecond), "with 20µs of work under it"},
		{shareFigures{Name: "client 1", Clients: 1}.title(), "client 1"},
		{shareFigures{Name: "process 1", Clients: 2, Polling: 2}.title(), "process 1, polling"},
		{shareFigures{Name: "process 1", Clients: 2, Polling: 1}.title(), "process 1, 1 of 2 clients polling"},
	}
	for _, tt := range tests {
		if tt.got != tt.want {
			t.Errorf("got %q, want %q", tt.got, tt.want)
		}
	}
}
