-- ours: a part of refresh, undo and done, which replaces "-- include ours.lua". It ends the script with a reply,
-- unless the key is the owner's.
--
-- KEYS[1]  the lock key
-- ARGV[1]  owner
--
-- Reply
--   0                there is no such key
--   {holder, pttl}   another owner's
--   error            the key is no string, or must not be read

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
