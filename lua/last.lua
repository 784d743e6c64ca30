-- last: a part of acquire, release and undo, which replaces "-- include last.lua". It puts contender behind all
-- others that wait, without a clock: one may stand still. added is what ZADD says.

local tail = redis.pcall('ZRANGE', KEYS[4], '-1', '-1', 'WITHSCORES')
local added = redis.pcall('ZADD', KEYS[4], (tonumber(tail[2]) or 0) + 1, contender)
redis.pcall('PEXPIRE', KEYS[4], '10000')
