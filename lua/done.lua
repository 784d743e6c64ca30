-- done: deletes our key if nobody waits for it, as most releases of locks that never had to wait do. If somebody
-- does, release.lua is to follow, for it passes the key on.
--
-- KEYS[1]  the lock key
-- KEYS[2]  the wants of that key (see release.lua)
-- ARGV[1]  owner, never ''
--
-- Reply
--   1                deleted
--   0                missing: there is no such key
--   -1               somebody waits; nothing was written
--   {holder, pttl}   another owner's
--   error            as for acquire

-- include ours.lua
if redis.pcall('EXISTS', KEYS[2]) ~= 0 then
  return -1
end
redis.call('DEL', KEYS[1])
return 1
