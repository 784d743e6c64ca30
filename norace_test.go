//go:build !race

package flightlock_test

const raced = false
