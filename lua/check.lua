-- check: tries every command that the lock scripts use, as they do and with their keys, and reports
-- which of them the server refuses. It leaves nothing behind.
--
-- KEYS[1]  a key with the prefix of locks, whose name nobody locks; it is read and never written
-- KEYS[2]  a key of flightlock's own in the same hash slot, with a name that nobody uses; it is written
--          and deleted again
--
-- Reply: a flat list of each command that failed and the error; empty if all may be called

local failed = {}
local function try(command, ...)
  local answer = redis.pcall(command, ...)
  if type(answer) == 'table' and answer.err then
    failed[#failed + 1] = command
    failed[#failed + 1] = answer.err
  end
end

try('SET', KEYS[1], '0', 'PX', '1000', 'XX') -- it does not exist: nothing is set
try('GET', KEYS[1])
try('PTTL', KEYS[1])
try('PEXPIRE', KEYS[1], '1000')
try('DEL', KEYS[1])
try('TIME')
-- The key is gone before it becomes one of another type, even if one of ZREM, HDEL and DEL is refused.
try('ZADD', KEYS[2], '1', 'a')
try('EXISTS', KEYS[2])
try('ZSCORE', KEYS[2], 'a')
try('ZRANGE', KEYS[2], '0', '0', 'WITHSCORES')
try('PEXPIRE', KEYS[2], '1000')
try('ZREM', KEYS[2], 'a') -- the last one: that removes the key
redis.pcall('DEL', KEYS[2])
try('HSET', KEYS[2], 'a', '1')
try('HGET', KEYS[2], 'a')
try('HDEL', KEYS[2], 'a') -- likewise
redis.pcall('DEL', KEYS[2])
try('SET', KEYS[2], '0', 'PX', '1000', 'NX')
try('GET', KEYS[2])
try('INCRBY', KEYS[2], '1')
redis.pcall('PEXPIRE', KEYS[2], '1000') -- whatever was refused
redis.pcall('DEL', KEYS[2])
return failed
