package rediscache_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock/rediscache"
)

// A custom Codec can check what it encodes.
func ExampleCodec() {
	inner := rediscache.JSON[account]()
	codec := rediscache.Codec[account]{
		Encode: func(a account) ([]byte, error) {
			if a.Name == "" {
				return nil, errors.New("an account needs a name")
			}
			return inner.Encode(a)
		},
		Decode: inner.Decode,
	}
	load := func(context.Context, string) (account, error) { return account{"Ada"}, nil }
	accounts, stop := exampleAccounts(load, rediscache.Options[account]{Fresh: time.Minute, Codec: codec})
	defer stop()
	fmt.Println(accounts.Get(context.Background(), "42"))
	fmt.Println(accounts.Set(context.Background(), "42", account{}) != nil) // and the entry is invalidated
	// Output:
	// {Ada} <nil>
	// true
}

func ExampleJSON() {
	b, err := rediscache.JSON[account]().Encode(account{"Ada"})
	fmt.Println(string(b), err, json.Valid(b))
	// Output: {"Name":"Ada"} <nil> true
}

// Bytes and Text are the default for []byte and string: GET shows the value behind a short header.
func ExampleBytes() {
	b, err := rediscache.Bytes().Encode([]byte{1, 2, 3})
	fmt.Println(b, err)
	// Output: [1 2 3] <nil>
}

func ExampleText() {
	v, err := rediscache.Text().Decode([]byte("Ada"))
	fmt.Println(v, err)
	// Output: Ada <nil>
}

// Key is for looking at an entry in Redis, as by redis-cli TTL.
func ExampleCache_Key() {
	accounts, stop := exampleAccounts(nil, rediscache.Options[account]{
		Name: "account", Version: "v2", Fresh: time.Minute,
		LoadMany: func(context.Context, []string) (map[string]account, error) { return nil, nil },
	})
	defer stop()
	fmt.Println(accounts.Key("42"))
	// Output: account:v2:42
}

func ExampleCache_Stats() {
	load := func(context.Context, string) (account, error) { return account{"Ada"}, nil }
	accounts, stop := exampleAccounts(load, rediscache.Options[account]{Fresh: time.Minute})
	defer stop()
	for range 10 {
		if _, err := accounts.Get(context.Background(), "42"); err != nil {
			panic(err)
		}
	}
	s := accounts.Stats()
	fmt.Println(s.Hits, s.Misses, s.Loads, s.Repeating)
	// Output: 9 1 1 0
}

// Close ends the cache before its Client and its server's client are closed. A deadline ends loads that take longer.
func ExampleCache_Close() {
	load := func(context.Context, string) (account, error) { return account{"Ada"}, nil }
	accounts, stop := exampleAccounts(load, rediscache.Options[account]{Fresh: time.Minute})
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	fmt.Println(accounts.Close(ctx))
	_, err := accounts.Get(ctx, "42")
	fmt.Println(err)
	// Output:
	// <nil>
	// rediscache: "42": the Cache is closed
}
