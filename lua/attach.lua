-- attach: one node's vote for a lease that takes the place of a detached one (Client.Attach): in one step the key
-- becomes the new owner's, if it is the detached owner's.
--
-- KEYS[1]  the lock key
-- KEYS[2]  the fence bucket of that key
-- KEYS[3]  the marker of the node's epoch, if ARGV[1] names one; else any key of the call
-- ARGV[1] to [3]  the node's epoch: see epoch.lua
-- ARGV[4]  owner, new and unique per attempt
-- ARGV[5]  ttl in milliseconds
-- ARGV[6]  top, the highest token that the detached lease has reserved; 0 if it does not know
-- ARGV[7] and more  the owners that it replaces: the detached one, and those of earlier attempts of the caller to
--          attach the same, whose outcome is unknown. Nobody holds a lock as one of these
--
-- Reply
--   c > 0            attached; the counter is now c. If it was above top, somebody may have had a token of this key
--                    after the detached lock: then it was raised by one more, and this node offers c
--   -c < 0           this very owner had the key already, as for acquire
--   0                missing: there is no such key
--   {holder, pttl}   another owner's; nothing was written
--   EPOCH, error     as for acquire
--
-- A refused command leaves the counter too high, or the key as it was: the key is written last.

-- include epoch.lua
if type(changed) == 'table' then
  return changed
elseif changed then
  return {err = 'EPOCH this node is in another epoch than ' .. ARGV[1] .. ', or shows more of it'}
end

local holder = redis.pcall('GET', KEYS[1])
local replaces = false
for i = 7, #ARGV do
  replaces = replaces or holder == ARGV[i]
end
if not replaces and holder ~= ARGV[4] then
  if not holder then
    return 0
  end
  if type(holder) == 'table' then
    return holder
  end
  return {holder, redis.call('PTTL', KEYS[1])}
end

local bucket, top, more = KEYS[2], ARGV[6], 0
-- include raise.lua
if not replaces then
  return -c
end
if c > tonumber(top) then
  c = redis.call('INCRBY', bucket, '1')
end
-- Never shorten a TTL: the replaced owner may have been refreshed with a longer one.
local ttl = math.max(redis.call('PTTL', KEYS[1]), tonumber(ARGV[5]))
redis.call('SET', KEYS[1], ARGV[4], 'PX', string.format('%.0f', ttl))
return c
