-- raise: a part of acquire, attach and confirm, which replaces "-- include raise.lua". It raises the counter in bucket to
-- top at least, and then by more, and sets c to it. A bucket that is missing starts at the node's clock: see reserve.lua.

local was = tonumber(redis.call('GET', bucket) or 0)
local c = was
if c <= 0 then
  local t = redis.call('TIME')
  c = t[1] * 1000000 + t[2]
end
c = math.max(c, top) + more
if c ~= was then
  redis.call('SET', bucket, string.format('%.0f', c))
end
