-- refresh: restores the full TTL of a lease, and confirms its fencing tokens.
--
-- In one atomic step, and only while the key is ours: the counter is raised to the
-- highest token reserved, and more tokens are reserved on top. A raise that did not
-- check the owner would be wrong: a late one could be executed after the next holder's grant.
--
-- KEYS[1]  the lock key
-- KEYS[2]  the fence bucket of that key. Left out where a Cluster has the two on different masters, while
--          it moves their slot: then only the TTL is restored
-- ARGV[1]  owner
-- ARGV[2]  ttl in milliseconds
-- ARGV[3]  top, the highest token that the lease has reserved
-- ARGV[4]  M, how many more to reserve; 0 for none
-- ARGV[5]  the contender of the lease, which does not count, if the reply is to name a rival; otherwise
--          left out
-- KEYS[3]  with ARGV[5]: the wants of the key (see release.lua)
--
-- Reply
--   c > 0            renewed: the key was ours before this call, and the counter is now
--                    c = max(counter, top) + M
--   {c, rival}       the same, and the contender that has waited longest; '' if there is none
--   {0, ''}          without KEYS[2]: the key was ours before this call; the counter was not read
--   0                missing: the key is gone; nothing was written
--   {holder, pttl}   another owner's; nothing was written
--   error            as for acquire

-- include ours.lua

-- Never shorten a TTL: the holder may rely on the longer one.
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
if not KEYS[2] then
  return {0, ''}
end

local last = '1'
-- include confirm.lua
