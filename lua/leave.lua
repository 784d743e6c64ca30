-- leave: the beginning of release, undo and done of a read lease, which lua.go puts before these. It ends the owner's
-- share of the key. If that was the last, the key is the owner's alone, and the script goes on as that of a key that
-- nobody shares; else it ends here, with the reply 1. See readers.lua, of the two more keys too.
--
-- The key's ttl follows the last share that is left: it is shortened here, which no other script does to a key. Nobody
-- relies on what is cut off: all shares that have not ended are in the set.

-- include readers.lua
if mine then
  redis.call('ZREM', readers, owner)
  local last = redis.call('ZRANGE', readers, '-1', '-1', 'WITHSCORES')[2]
  if last and tonumber(last) >= now then
    redis.call('PEXPIRE', KEYS[1], math.max(1, last - now))
    return 1
  end
  redis.call('DEL', readers)
  redis.call('SET', KEYS[1], owner, 'PX', math.max(1, mine - now))
end
