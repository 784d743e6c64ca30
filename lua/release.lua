-- release: deletes the key, if it is ours. Owners are compared whole, never by prefix.
--
-- KEYS[1]  the lock key
-- ARGV[1]  owner
--
-- Reply
--   1                deleted
--   0                missing: there is no such key
--   {holder, pttl}   another's; it was left alone
--   error            as for acquire

local holder = redis.pcall('GET', KEYS[1])
if holder == ARGV[1] then
  redis.call('DEL', KEYS[1])
  return 1
end
if not holder then
  return 0
end
if type(holder) == 'table' then
  return holder
end
return {holder, redis.call('PTTL', KEYS[1])}
