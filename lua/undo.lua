-- undo: deletes the key of an attempt that failed. It makes no turn.
--
-- KEYS[1]  the lock key
-- KEYS[4]  the wants of that key (see release.lua); with ARGV[2] only. KEYS[2] and [3] are not accessed
-- KEYS[5]  the offers of that key; with ARGV[3] only
-- ARGV[1]  owner, never '': a key with an empty value is another client's
-- ARGV[2]  the contender for which the attempt was made. It continues to wait, but the grant removed its
--          want, so the want is registered again. A node without the want would not name this
--          contender when the others do, but another one, which would get only this node's vote. Left
--          out if the attempt had no contender, and where a Cluster has the keys on different masters
-- ARGV[3]  with ARGV[2]: the contender's offer (see release.lua), which is kept beside its want again, as
--          the grant removed it. '' if the owner is that of an offer, which is taken back: then the
--          contender's offer is deleted, also if the key is not the owner's. Left out if the attempt
--          brought no offer, and on a Cluster
--
-- Reply
--   1                deleted
--   0                missing: there is no such key
--   {holder, pttl}   another owner's; the key and the wants were not changed
--   error            as for acquire

if ARGV[3] == '' then
  redis.pcall('HDEL', KEYS[5], ARGV[2])
end
-- include ours.lua
if ARGV[2] then -- nothing about wants may make an undo fail
  local contender = ARGV[2]
  -- include last.lua
  if ARGV[3] and ARGV[3] ~= '' then
    redis.pcall('HSET', KEYS[5], contender, ARGV[3])
    redis.pcall('PEXPIRE', KEYS[5], '10000')
  end
end
redis.call('DEL', KEYS[1])
return 1
