-- Invalidates a tag: loads that began before cannot be stored with it from now on. What is stored is removed afterwards.
--
-- KEYS[1]  the tag: see tag.lua
-- ARGV[1]  random digits
-- ARGV[2]  the generation that began with this invalidation
-- ARGV[3]  how long loads from before may still be under way, in milliseconds

local before = tonumber(redis.call('ZSCORE', KEYS[1], '') or 0)
redis.call('ZADD', KEYS[1], string.format('%.0f', math.max(before, tonumber(ARGV[2]))), '')
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return 1
