package conn

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/auth"
)

// hanging is a provider of streamed credentials that waits for its token.
type hanging struct {
	token chan struct{}
	ended atomic.Int32
}

func (h *hanging) Subscribe(auth.CredentialsListener) (auth.Credentials, auth.UnsubscribeFunc, error) {
	<-h.token
	return auth.NewBasicCredentials("user", "token"), func() error { h.ended.Add(1); return nil }, nil
}

// A provider of streamed credentials that hangs keeps nobody, and a subscription that comes too late is
// ended.
func TestAStreamOfCredentialsThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stream := &hanging{token: make(chan struct{})}
		c := redis.NewClient(&redis.Options{
			Addr: "10.0.0.1:6379",
			Dialer: func(context.Context, string, string) (net.Conn, error) {
				ours, _ := net.Pipe()
				return ours, nil
			},
			StreamingCredentialsProvider: stream,
		})
		defer c.Close()
		own, err := DialOnce(t.Context(), c.Options(), time.Second, NewLimit(1), func(*redis.Options) {})
		if err != nil {
			t.Fatal(err)
		}
		defer own.Close()
		began := time.Now()
		err = own.Ping(t.Context()).Err()
		if err == nil || !strings.Contains(err.Error(), "no credentials in time") {
			t.Error(err)
		}
		if took := time.Since(began); took > DialTimeout {
			t.Errorf("it took %v", took)
		}
		close(stream.token)
		synctest.Wait()
		if n := stream.ended.Load(); n != 1 {
			t.Errorf("%d subscriptions have ended", n)
		}
	})
}
