-- The lookup before a load. It leaves a stamp with which the load can be stored.
--
-- KEYS[1]  the entry
-- ARGV[1]  random digits
-- ARGV[2]  how long the stamp has to stay at least, in milliseconds
--
-- Returns the entry, which is a new tombstone if there was none, and the server's time in
-- microseconds.

local entry = redis.call('GET', KEYS[1])
if stampOf(entry) == '' then
  entry = 'fl1:t' .. newStamp()
  redis.call('SET', KEYS[1], entry, 'PX', ARGV[2])
else
  local left = redis.call('PTTL', KEYS[1])
  if left >= 0 and left < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
end
return {entry, string.format('%.0f', now)}
