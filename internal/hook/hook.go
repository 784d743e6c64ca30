// Package hook lets flightlocktest and rediscache reach into a client, which users cannot and need not.
package hook

// KeyPrefix is Options.KeyPrefix of a client (a *flightlock.Client); "" is none. flightlock sets it.
var KeyPrefix func(client any) string

// Holders gives, for each Lock that a client (a *flightlock.Client) holds on key now, a
// function that refreshes that Lock and returns its Err. flightlock sets it.
var Holders func(client any, key string) []func() error
