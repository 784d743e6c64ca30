package node_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/node"
	"github.com/flightlock/flightlock/internal/pubsub"
	"github.com/flightlock/flightlock/internal/redistest"
	"github.com/redis/go-redis/v9"
)

const patience = 20 * time.Second

// events are those of one watch, in order.
type events chan pubsub.Event

func (e events) OnEvent(_ int, event pubsub.Event) { e <- event }

// want waits for the next event, which must be of that kind.
func (e events) want(t *testing.T, kind pubsub.Kind) {
	t.Helper()
	select {
	case got := <-e:
		if got.Kind != kind {
			t.Fatalf("event %v, want kind %v", got, kind)
		}
	case <-time.After(patience):
		t.Fatalf("no event, want kind %v", kind)
	}
}

// watch begins a watch on a node of c; both end with the test.
func watch(t *testing.T, c redis.UniversalClient, key string, prepare func(*node.Node)) (*node.Node, events) {
	t.Helper()
	n, err := node.New(c, 50*time.Millisecond, false)
	if err != nil {
		t.Fatal(err)
	}
	subs := pubsub.New(n, func(string) {})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := subs.Close(ctx); err != nil {
			t.Error(err)
		}
		if err := n.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	prepare(n)
	heard := make(events, 100)
	w, _ := subs.Watch(key, "", 7, heard)
	t.Cleanup(w.Stop)
	return n, heard
}

// No subscription connection to a suspended server is dialed: only the link dials it, every 250 ms.
func TestSubscriptionsDoNotDialASuspendedServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := redistest.StartMemNode(t, "10.0.0.1:6379")
		m.Down(true)
		var dials atomic.Int64
		_, heard := watch(t, m.Client(t, redistest.CountDials(&dials)), "k", func(n *node.Node) {
			if n.Ready(t.Context()) == nil || !n.Suspended() {
				t.Error("the node is not suspended")
			}
		})
		heard.want(t, pubsub.Unsubscribed) // it has tried
		dials.Store(0)
		const lasts = 10 * time.Second
		time.Sleep(lasts) // the bubble's time
		if got, most := dials.Load(), int64(lasts/(250*time.Millisecond)); got > most || got < most/2 {
			t.Errorf("%d dials in %v, want %d", got, lasts, most)
		}
		m.Down(false)
		heard.want(t, pubsub.Subscribed)
	})
}

// A master that leaves and comes back has another client of the cluster client's: subscriptions go to
// that one.
func TestSubscriptionsGoToAMastersNewClient(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3)
	client := cluster.Client(t)
	key := cluster.KeyOn(t, cluster.Servers()[0], "anew")
	fresh := redis.NewClient(&redis.Options{Addr: cluster.Servers()[0].Addr()})
	t.Cleanup(func() { _ = fresh.Close() }) // after the node
	n, heard := watch(t, client, key, func(*node.Node) {})
	heard.want(t, pubsub.Subscribed)
	master, err := client.MasterForKey(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	_ = master.Close()
	heard.want(t, pubsub.Unsubscribed)
	n.Meet(fresh, key) // what finding the new client does
	heard.want(t, pubsub.Subscribed)
}
