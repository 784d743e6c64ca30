package conn

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/auth"
)

// Providers of credentials are code of the user's that may ask another service for them, and may hang. A
// connection may be dialed on the goroutine of a caller who waits for no longer than its ctx, so they are
// awaited like dialers.

// HasProvider reports whether o's credentials come from a provider, and may be others the next time.
func HasProvider(o *redis.Options) bool {
	return o.CredentialsProvider != nil || o.CredentialsProviderContext != nil ||
		o.StreamingCredentialsProvider != nil
}

// awaitCredentials returns o's provider of credentials, or one without a ctx, as one that returns when its
// ctx has ended. It is nil if o has none.
func awaitCredentials(o *redis.Options,
	dials Limit) func(context.Context) (user, password string, err error) {
	provide := o.CredentialsProviderContext
	if ask := o.CredentialsProvider; provide == nil && ask != nil {
		provide = func(context.Context) (string, string, error) {
			user, password := ask()
			return user, password, nil
		}
	}
	if provide == nil {
		return nil
	}
	type credentials struct{ user, password string }
	return func(ctx context.Context) (string, string, error) {
		got, err := Await(ctx, dials, func() (c credentials, err error) {
			c.user, c.password, err = provide(ctx)
			return c, err
		}, nil)
		return got.user, got.password, inTime(ctx, err)
	}
}

// awaitedStream is a provider of streamed credentials that returns after DialTimeout: it is not told of any
// ctx.
type awaitedStream struct {
	auth.StreamingCredentialsProvider
	dials Limit
}

// Subscribe is that of the provider. A subscription that comes late is ended.
func (s awaitedStream) Subscribe(l auth.CredentialsListener) (auth.Credentials, auth.UnsubscribeFunc, error) {
	ctx, cancel := context.WithTimeout(context.Background(), DialTimeout)
	defer cancel()
	type subscription struct {
		auth.Credentials
		end auth.UnsubscribeFunc
	}
	got, err := Await(ctx, s.dials, func() (sub subscription, err error) {
		sub.Credentials, sub.end, err = s.StreamingCredentialsProvider.Subscribe(l)
		return sub, err
	}, func(late subscription) { _ = late.end() })
	return got.Credentials, got.end, inTime(ctx, err)
}

func inTime(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("no credentials in time: %w", err)
	}
	return err
}
