package flightlock

import "github.com/flightlock/flightlock/internal/hook"

func init() {
	hook.Holders = func(client any, key string) []func() error {
		c := client.(*Client)
		return c.flights.Holders(key, c.opts.NodeTimeout)
	}
}
