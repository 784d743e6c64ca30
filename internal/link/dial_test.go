package link

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
)

// A dialer that ignores its ctx may hang for minutes after the network is back, as those over TLS and many of
// users do. The dials of those in a hurry leave room for others: the server is dialled as ever.
func TestDialsThatHangLeaveRoomForOthers(t *testing.T) {
	var down atomic.Bool
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		time.Sleep(time.Minute)
		down.Store(true)
		r.s.cut()
		synctest.Wait()
		r.do("a")
		time.Sleep(2 * time.Second)
		down.Store(false)
		time.Sleep(2 * time.Second)
		r.do("b")
		const why = "no connection within 1.5s: context deadline exceeded"
		r.wantSorted("a was not sent: "+suspended+why, "b", "suspended: <nil>", "suspended: "+why)
		time.Sleep(3 * time.Minute) // the dials end
	}, func(r *rig, o *Options) {
		o.Of.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if down.Load() {
				time.Sleep(2 * time.Minute)
				return nil, errRefused
			}
			return r.s.dial(ctx, network, addr)
		}
	})
}

// A login that hangs is a failed dial after a while, and Close does not wait for it: it may be code of the
// user's that never returns.
func TestLoginsThatHang(t *testing.T) {
	for name, hangs := range map[string]func(context.Context){
		"until its ctx ends": func(ctx context.Context) { <-ctx.Done() },
		"whatever its ctx":   func(context.Context) { time.Sleep(time.Hour) },
	} {
		t.Run(name, func(t *testing.T) {
			link(t, func(t *testing.T, r *rig) {
				r.do("a")
				time.Sleep(5 * time.Second)
				const why = "context deadline exceeded"
				r.want("a was not sent: "+suspended+why, "suspended: "+why)
				began := time.Now()
				r.Close()
				if took := time.Since(began); took > time.Second {
					t.Errorf("Close has taken %v", took)
				}
				time.Sleep(2 * time.Hour) // they end
			}, func(r *rig, o *Options) {
				o.Of.OnConnect = func(ctx context.Context, _ *redis.Conn) error {
					hangs(ctx)
					return ctx.Err()
				}
			})
		})
	}
}

// goneAfterSaying is a connection that the server has closed, after it has said why: the login can't be
// written.
type goneAfterSaying struct {
	net.Conn
	why error
}

func (c goneAfterSaying) Write([]byte) (int, error) { return 0, syscall.ECONNRESET }
func (c goneAfterSaying) Read([]byte) (int, error)  { return 0, c.why }

// A server that closes the connection before the login was written has said why: that it wants a certificate
// of the client, say. Once Check named the reset, and not the certificate, where the server was quicker than
// the login.
func TestWhyTheServerClosedBeforeTheLogin(t *testing.T) {
	for said, tc := range map[string]struct {
		read error
		want string
	}{
		"why": {errRefused, errRefused.Error()},
		"nothing": {io.EOF,
			"the connection was closed at HELLO, the first command, as by a server that expects TLS, " +
				"or a proxy that does not know HELLO (twemproxy): " + syscall.ECONNRESET.Error()},
	} {
		t.Run(said, func(t *testing.T) {
			link(t, func(t *testing.T, r *rig) {
				r.do("a")
				time.Sleep(2 * time.Second)
				r.wantSorted("a was not sent: "+suspended+tc.want, "suspended: "+tc.want)
			}, func(r *rig, o *Options) {
				o.Of.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
					c, err := r.s.dial(ctx, network, addr)
					return goneAfterSaying{c, tc.read}, err
				}
			})
		})
	}
}
