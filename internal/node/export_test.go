package node

import "github.com/redis/go-redis/v9"

// Meet makes key's slot belong to a master whose client has been made anew.
func (n *Node) Meet(master *redis.Client, key string) {
	n.router.owner[SlotOf(key)].Store(n.router.server(master))
}
