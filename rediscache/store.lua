-- Stores a value, that there is none, or a tombstone, if the entry still has the stamp that was looked up, but for its
-- mark. An entry that is missing now has none.
--
-- KEYS[1]  the entry
-- ARGV[1]  random digits
-- ARGV[2]  the stamp
-- ARGV[3]  its new kind: v, n or t
-- ARGV[4]  how long it is fresh, in microseconds
-- ARGV[5]  how long until it expires, in microseconds
-- ARGV[6]  the same in milliseconds, at least 1
-- ARGV[7]  how long the load took, as the header has it
-- ARGV[8]  the encoded value
--
-- Returns 1, or 0 if it stored nothing.

local stamp = stampOf(redis.call('GETRANGE', KEYS[1], 0, 36))
if stamp == '' or string.sub(stamp, 1, 24) ~= string.sub(ARGV[2], 1, 24) then
  return 0
end
local kind = ARGV[3]
if stamp ~= ARGV[2] then -- it was marked after the lookup: see mark.lua
  kind = kind == 'v' and 'r' or 't'
end
local header = string.format('fl1:%s%s%016.0f%016.0f%s', kind, newStamp(), now + ARGV[4], now + ARGV[5], ARGV[7])
redis.call('SET', KEYS[1], header .. ARGV[8], 'PX', ARGV[6])
return 1
