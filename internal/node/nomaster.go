package node

import (
	"errors"
	"strings"

	"github.com/redis/go-redis/v9"
)

// NoMaster reports whether err is that of go-redis' dialer for a Sentinel-managed master when no Sentinel has
// named the master. What a Sentinel has answered is part of it, and is no reply of the node's. unknown says
// that one has answered that it knows no master of that name.
func NoMaster(err error) (unknown, is bool) {
	if err == nil || !strings.Contains(err.Error(), "all sentinels specified in configuration are unreachable") {
		return false, false
	}
	return errors.Is(err, redis.Nil), true
}
