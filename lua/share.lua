-- share: a part of rlock and rrefresh, which replaces "-- include share.lua". See readers.lua.

-- keep has the owner's share end then. The key and the set live as long as the last of them. Shares that have ended and
-- were not taken away, as of a process that was killed, go as others come: one for each that comes.
local function keep(deadline)
  redis.call('ZADD', readers, deadline, owner)
  local first = redis.call('ZRANGE', readers, '0', '0', 'WITHSCORES')
  if tonumber(first[2]) < now then
    redis.call('ZREM', readers, first[1])
  end
  local left = redis.call('ZRANGE', readers, '-1', '-1', 'WITHSCORES')[2] - now
  redis.call('PEXPIRE', KEYS[1], left)
  redis.call('PEXPIRE', readers, left)
end

-- open shares the key, which is the owner's, for as long as it is. Shares that were left behind, as when the key was
-- deleted, are over: somebody else may have had the key since. The readers that wait before all others are told to try
-- again: each of them may join.
local function open()
  local left = math.max(1, redis.call('PTTL', KEYS[1]))
  redis.call('SET', KEYS[1], shared, 'PX', left)
  redis.call('DEL', readers)
  keep(now + left)
  for _, name in ipairs(redis.pcall('ZRANGE', waiting, '0', '99')) do
    local client, number = string.match(name, '^.*#(.*)%-(%w+S)$')
    if not client then
      break
    end
    redis.pcall('PUBLISH', 'flightlock:inbox:' .. client, number .. ' turn')
  end
end
