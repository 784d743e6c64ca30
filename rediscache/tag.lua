-- Adds keys to a tag, before their values are stored.
--
-- A tag is a sorted set of the keys whose entries may have it, scored by when the last such entry is over, by this
-- server's time in microseconds. The score of a key rises whenever it is added. The member '' is scored by the
-- generation in which the tag was invalidated.
--
-- KEYS[1]  the tag
-- ARGV[1]  random digits
-- ARGV[2]  the generation in which the loads began
-- ARGV[3]  for how long the tag has to stay after the last of its entries is over, in milliseconds
-- ARGV[4]  a key
-- ARGV[5]  in how many milliseconds its entry is over, and so on for more keys
--
-- Returns 1, or 0 if the tag was invalidated since: then nothing may be stored with it.

if tonumber(redis.call('ZSCORE', KEYS[1], '') or 0) > tonumber(ARGV[2]) then
  return 0
end
local last = 0
for i = 4, #ARGV, 2 do
  local due = math.max(now + ARGV[i + 1] * 1000, tonumber(redis.call('ZSCORE', KEYS[1], ARGV[i]) or 0) + 1)
  redis.call('ZADD', KEYS[1], string.format('%.0f', due), ARGV[i])
  last = math.max(last, due)
end
-- Some that are over make room, more than have come.
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, #ARGV)) do
  if key ~= '' then
    redis.call('ZREM', KEYS[1], key)
  end
end
local stays = math.ceil((last - now) / 1000) + ARGV[3]
if redis.call('PTTL', KEYS[1]) < stays then
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', stays))
end
return 1
