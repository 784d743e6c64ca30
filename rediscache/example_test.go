package rediscache_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/flightlock/flightlock"
	"github.com/flightlock/flightlock/fetch"
	"github.com/flightlock/flightlock/flightlocktest"
	"github.com/flightlock/flightlock/rediscache"
)

type account struct{ Name string }

func loadAda(context.Context, string) (account, error) { return account{"Ada"}, nil }

// exampleAccounts is a Cache of accounts over in-memory servers.
func exampleAccounts(load fetch.Loader[account],
	opts rediscache.Options[account]) (*rediscache.Cache[account], func()) {
	nodes := flightlocktest.Start(1)
	locks, err := nodes.Client(flightlock.Options{})
	if err != nil {
		panic(err)
	}
	accounts, err := rediscache.New(locks, nodes.Redis(0), load, opts)
	if err != nil {
		panic(err)
	}
	return accounts, func() {
		accounts.Close(context.Background())
		nodes.Close()
	}
}

// A value is loaded once, found afterwards, and loaded again after the change that Invalidate follows.
func Example() {
	name := "Ada"
	load := func(context.Context, string) (account, error) {
		fmt.Println("SELECT name FROM accounts")
		return account{name}, nil
	}
	accounts, stop := exampleAccounts(fetch.Each(load),
		rediscache.Options[account]{Name: "account", Fresh: time.Minute})
	defer stop()

	ctx := context.Background()
	for range 2 {
		a, err := accounts.Get(ctx, "42")
		fmt.Println(a.Name, err)
	}
	name = "Ada Lovelace" // UPDATE, COMMIT
	fmt.Println(accounts.Invalidate(ctx, "42"))
	a, err := accounts.Get(ctx, "42")
	fmt.Println(a.Name, err)
	// Output:
	// SELECT name FROM accounts
	// Ada <nil>
	// Ada <nil>
	// <nil>
	// SELECT name FROM accounts
	// Ada Lovelace <nil>
}

func ExampleNew() {
	_, err := rediscache.New[account](nil, nil, nil, rediscache.Options[account]{})
	fmt.Println(err)
	// Output: flightlock: invalid: c is nil, but a Cache locks by a Client
}

// Set stores the value that the caller has just written to the origin: the next Get needs no load.
func ExampleCache_Set() {
	load := func(context.Context, string) (account, error) { panic("not needed") }
	accounts, stop := exampleAccounts(fetch.Each(load), rediscache.Options[account]{Fresh: time.Minute})
	defer stop()
	fmt.Println(accounts.Set(context.Background(), "42", account{"Ada"}))
	fmt.Println(accounts.Get(context.Background(), "42"))
	// Output:
	// <nil>
	// {Ada} <nil>
}

// With NotFoundFor the absence of a value is cached.
func ExampleErrNotFound() {
	load := func(context.Context, string) (account, error) {
		fmt.Println("SELECT name FROM accounts")
		return account{}, fmt.Errorf("no such account: %w", rediscache.ErrNotFound)
	}
	accounts, stop := exampleAccounts(fetch.Each(load), rediscache.Options[account]{
		Fresh: time.Minute, NotFoundFor: 10 * time.Second,
	})
	defer stop()
	for range 2 {
		_, err := accounts.Get(context.Background(), "42")
		fmt.Println(errors.Is(err, rediscache.ErrNotFound))
	}
	// Output:
	// SELECT name FROM accounts
	// true
	// true
}

// GetWith brings a load that needs more than the key.
func ExampleCache_GetWith() {
	accounts, stop := exampleAccounts(nil, rediscache.Options[account]{Fresh: time.Minute})
	defer stop()
	tenant := "acme"
	a, err := accounts.GetWith(context.Background(), tenant+"/42",
		func(ctx context.Context, key string) (account, error) {
			return account{"Ada of " + tenant}, nil
		})
	fmt.Println(a, err)
	// Output: {Ada of acme} <nil>
}

// Many keys are loaded together. Those that do not exist are absent from the result.
func ExampleCache_GetMany() {
	load := func(_ context.Context, ids []string) (map[string]account, error) {
		fmt.Println("SELECT id, name FROM accounts WHERE id IN", ids)
		return map[string]account{"1": {"Ada"}, "2": {"Grace"}}, nil
	}
	accounts, stop := exampleAccounts(load, rediscache.Options[account]{Fresh: time.Minute})
	defer stop()
	fmt.Println(accounts.GetMany(context.Background(), []string{"1", "2", "3"}))
	_, err := accounts.Get(context.Background(), "4")
	fmt.Println(errors.Is(err, rediscache.ErrNotFound))
	// Output:
	// SELECT id, name FROM accounts WHERE id IN [1 2 3]
	// map[1:{Ada} 2:{Grace}] <nil>
	// SELECT id, name FROM accounts WHERE id IN [4]
	// true
}

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
	accounts, stop := exampleAccounts(fetch.Each(loadAda),
		rediscache.Options[account]{Fresh: time.Minute, Codec: codec})
	defer stop()
	fmt.Println(accounts.Get(context.Background(), "42"))
	fmt.Println(accounts.Set(context.Background(), "42", account{}) != nil) // and the entry is invalidated
	// Output:
	// {Ada} <nil>
	// true
}

// JSON is the default Codec, but for []byte and string: of these GET shows the value behind a short header.
func Example_codecs() {
	b, err := rediscache.JSON[account]().Encode(account{"Ada"})
	fmt.Println(string(b), err)
	b, err = rediscache.Bytes().Encode([]byte{1, 2, 3})
	fmt.Println(b, err)
	v, err := rediscache.Text().Decode([]byte("Ada"))
	fmt.Println(v, err)
	// Output:
	// {"Name":"Ada"} <nil>
	// [1 2 3] <nil>
	// Ada <nil>
}

// Key is for looking at an entry in Redis, as by redis-cli TTL.
func ExampleCache_Key() {
	accounts, stop := exampleAccounts(nil, rediscache.Options[account]{
		Name: "account", Version: "v2", Fresh: time.Minute,
	})
	defer stop()
	fmt.Println(accounts.Key("42"))
	// Output: account:v2:42
}

func ExampleCache_Stats() {
	accounts, stop := exampleAccounts(fetch.Each(loadAda), rediscache.Options[account]{Fresh: time.Minute})
	defer stop()
	for range 10 {
		_, _ = accounts.Get(context.Background(), "42")
	}
	s := accounts.Stats()
	fmt.Println(s.Hits, s.Misses, s.Loads, s.Repeating)
	// Output: 9 1 1 0
}

// Close ends the cache before its Client and its server's client are closed. A deadline ends loads that take
// longer.
func ExampleCache_Close() {
	accounts, stop := exampleAccounts(fetch.Each(loadAda), rediscache.Options[account]{Fresh: time.Minute})
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	fmt.Println(accounts.Close(ctx))
	_, err := accounts.Get(ctx, "42")
	fmt.Println(err)
	// Output:
	// <nil>
	// flightlock: the Cache is closed
}

// A load that gets the old value asks the origin whether it has changed since.
func ExampleCache_Refresh() {
	load := fetch.LoadFrom(func(_ context.Context, _ string, old fetch.Entry[account]) (account, error) {
		if old.Fresh != fetch.Miss {
			fmt.Println("GET /accounts/42, If-None-Match:", old.Value.Name) // 304 Not Modified
			return old.Value, nil
		}
		fmt.Println("GET /accounts/42")
		return account{"Ada"}, nil
	})
	accounts, stop := exampleAccounts(load, rediscache.Options[account]{Name: "account", Fresh: time.Minute})
	defer stop()
	ctx := context.Background()
	fmt.Println(accounts.Get(ctx, "42"))
	fmt.Println(accounts.Refresh(ctx, "42"))
	// Output:
	// GET /accounts/42
	// {Ada} <nil>
	// GET /accounts/42, If-None-Match: Ada
	// <nil>
}

// Peek shows what Redis has, and loads nothing. After Expire the old value is stale, but still there.
func ExampleCache_Peek() {
	accounts, stop := exampleAccounts(nil, rediscache.Options[account]{Fresh: time.Minute, Stale: time.Hour})
	defer stop()
	ctx := context.Background()
	_, fresh, err := accounts.Peek(ctx, "1")
	fmt.Println(fresh == fetch.Miss, err)
	fmt.Println(accounts.SetMany(ctx, map[string]account{"1": {"Ada"}, "2": {"Grace"}}))
	fmt.Println(accounts.Expire(ctx, "1"))
	for _, key := range []string{"1", "2"} {
		a, fresh, err := accounts.Peek(ctx, key)
		fmt.Println(a.Name, fresh == fetch.Fresh, err)
	}
	// Output:
	// true <nil>
	// <nil>
	// <nil>
	// Ada false <nil>
	// Grace true <nil>
}

// Long values are compressed. A Version keeps them apart from those that were stored without.
func ExampleCompressed() {
	accounts, stop := exampleAccounts(fetch.Each(loadAda), rediscache.Options[account]{
		Name: "account", Version: "v2", Fresh: time.Minute,
		Codec: rediscache.Compressed(rediscache.JSON[account](), 1<<10),
	})
	defer stop()
	fmt.Println(accounts.Get(context.Background(), "42"))
	// Output: {Ada} <nil>
}

// InvalidateTag invalidates all values with a tag, and Clear deletes all.
func ExampleCache_InvalidateTag() {
	load := func(context.Context, string) (account, error) {
		fmt.Println("SELECT name FROM accounts")
		return account{"Ada"}, nil
	}
	accounts, stop := exampleAccounts(fetch.Each(load), rediscache.Options[account]{
		Name: "account", Fresh: time.Minute,
		Tags: func(_ string, a account) []string { return []string{"name " + a.Name} },
	})
	defer stop()
	ctx := context.Background()
	for range 2 {
		_, err := accounts.Get(ctx, "42")
		fmt.Println(err, accounts.InvalidateTag(ctx, "name Ada"))
	}
	fmt.Println(accounts.Clear(ctx, func(keys int) { fmt.Println(keys, "key") }))
	// Output:
	// SELECT name FROM accounts
	// <nil> <nil>
	// SELECT name FROM accounts
	// <nil> <nil>
	// 1 key
	// <nil>
}
