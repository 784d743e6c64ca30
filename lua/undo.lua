-- undo: takes back the grant of an attempt that was lost. It makes no turn.
--
-- KEYS[1]  the lock key
-- KEYS[2]  the wants of that key (see release.lua); with ARGV[2] only
-- ARGV[1]  owner, never '': a key with an empty value is another client's
-- ARGV[2]  the contender that the attempt was made for. It goes on waiting, and the grant took away its
--          want: that it gets back. A node that did not know it would not name it when the others do;
--          whom it names instead would be granted its vote alone, lose, and not be known next. Left
--          out if the attempt had no contender, and where a Cluster has the keys apart
--
-- Reply
--   1                deleted
--   0                missing: there is no such key
--   {holder, pttl}   another's; it was left alone
--   error            as for acquire

local offer = ARGV[3] and 'flightlock:{offer}:' .. ARGV[2]
if ARGV[3] == '' then
  redis.pcall('DEL', offer)
end
local holder = redis.pcall('GET', KEYS[1])
if holder ~= ARGV[1] then
  if not holder then
    return 0
  end
  if type(holder) == 'table' then
    return holder
  end
  return {holder, redis.call('PTTL', KEYS[1])}
end
if ARGV[2] then -- nothing about wants may make an undo fail
  local t = redis.call('TIME')
  redis.pcall('ZADD', KEYS[2], t[1] .. string.sub('00000' .. t[2], -6), ARGV[2])
  redis.pcall('PEXPIRE', KEYS[2], '10000')
  if offer and ARGV[3] ~= '' then
    redis.pcall('SET', offer, ARGV[3], 'PX', '10000')
  end
end
redis.call('DEL', KEYS[1])
return 1
