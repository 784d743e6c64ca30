package node

import "github.com/redis/go-redis/v9"

// Suspend makes the node's first server count as suspended, or not any more, without probes.
func (n *Node) Suspend(yes bool) {
	if yes {
		n.servers[0].suspended.Store(&suspension{err: ErrStalled, isBack: func() {}})
	} else {
		n.servers[0].suspended.Store(nil)
	}
}

// Meet makes key's slot belong to a master whose client has been made anew.
func (n *Node) Meet(master *redis.Client, key string) {
	n.router.owner[SlotOf(key)].Store(n.router.server(master))
}
