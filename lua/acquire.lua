-- acquire: one node's vote for a lease. Idempotent: the same owner may ask again.
--
-- KEYS[1]  the lock key; holds the owner, a plain string with a TTL
-- KEYS[2]  the fence bucket of that key: a counter that never expires. Left out where a Cluster
--          may have the two on different masters, while it moves their slot: see ARGV[9]
-- KEYS[3]  the marker of the node's epoch, if ARGV[1] names one
-- KEYS[4]  the wants of that key (see release.lua); with ARGV[8] only. Left out where a Cluster
--          may have them on different masters: then no want is registered
-- KEYS[5]  the offers of that key (see release.lua). Left out where none are made
-- ARGV[1] to [3]  the node's epoch: see epoch.lua
-- ARGV[4]  owner: unique per attempt
-- ARGV[5]  ttl in milliseconds, at least 1
-- ARGV[6]  B, the size of the block of fencing tokens; 0 for a repair
-- ARGV[7]  repairs: the highest token the lease has reserved; else 0 or left out
-- ARGV[8]  contender: the name under which the caller waits for the key, the same in all its attempts.
--          It takes a turn that is reserved for it; if the key is another owner's, its want is registered
-- ARGV[9]  with KEYS[5]: the contender's offer (see release.lua), which goes with its want; may be
--          left out. Without KEYS[2]: the name of the fence bucket, which may be here all the same
-- ARGV[10] waits, with an offer: a free key is left to the one that waits longest, if that is another. May
--          be left out
--
-- Reply
--   c > 0            granted; the counter is now c and this node offers (c-B, c]
--   {c, next}        the same, to a contender: the contender next waits longest
--   -c < 0           this very owner held the key already: its TTL is at least ARGV[5] again, and no
--                    block was reserved (nobody can have been granted a later token of this key
--                    meanwhile). c is the counter, after a repair at least ARGV[7]; a counter that
--                    was lost starts again at the node's clock
--   {holder, pttl}   held by another, or kept for another's turn; pttl in milliseconds,
--                    below 0 when unknown. The holder is "flightlock:turn:", without a name, if
--                    the key is free and was left to another
--   EPOCH            an error: the node's epoch is not the caller's, see epoch.lua; nothing was written
--   TRYAGAIN         an error, without KEYS[2]: the bucket is not here; nothing was written
--   error            WRONGTYPE when the key holds something that is not a string, what
--                    INCRBY says of a bucket that is not a counter, or what the server
--                    says of its own state (OOM, READONLY, ...); nothing was written
--
-- The included parts define when a node must not vote (epoch.lua), and how tokens are counted (reserve.lua).
--
-- A holder that ends with R is of a client that may retain the key: keep it although nobody in its
-- process holds it. Each acquire that finds it publishes a recall to that client's inbox (see
-- release.lua): "recall: LENGTH LENGTH " and then holder, contender and key, without anything in
-- between. The lengths are those of the holder and of the contender, 0 if none is registered. A repair
-- wants nothing, and recalls nothing; nor does an acquire without KEYS[2], on a Cluster, where no client
-- retains.
--
-- Numbers stay below 2^53; '%.0f' because Lua prints large ones in exponents. Those that are always the same are
-- texts, because the conversion would take longer than the command.

-- include epoch.lua
if type(changed) == 'table' then
  return changed
elseif changed then
  return {err = 'EPOCH this node is in another epoch than ' .. ARGV[1] .. ', or shows more of it'}
end

local bucket = KEYS[2]
if not bucket then
  local holder = redis.pcall('GET', KEYS[1])
  if type(holder) == 'table' then
    return holder
  end
  if holder and holder ~= ARGV[4] and holder ~= 'flightlock:turn:' .. (ARGV[8] or '') then
    return {holder, redis.call('PTTL', KEYS[1])}
  end
  bucket = ARGV[9]
  if not bucket or redis.pcall('EXISTS', bucket) ~= 1 then
    return {err = 'TRYAGAIN the key and its fence bucket are apart, while their slot moves'}
  end
end

local holder = false
local granted = ARGV[10] ~= 'waits' and redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5], 'NX')
if not granted then
  holder = redis.pcall('GET', KEYS[1])
  if not holder and ARGV[10] == 'waits' then
    local first = redis.pcall('ZRANGE', KEYS[4], '0', '0')[1]
    if first and first ~= ARGV[8] then
      holder = 'flightlock:turn:'
    end
  end
  if not holder or ARGV[8] and holder == 'flightlock:turn:' .. ARGV[8] then
    granted = redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5])
  end
end

if granted then
  local size = ARGV[6]
  local block = tonumber(size)
  -- include reserve.lua
  if type(c) == 'table' then -- take the vote back
    redis.call('DEL', KEYS[1])
    return c
  end
  if ARGV[7] and c < tonumber(ARGV[7]) then
    c = tonumber(ARGV[7])
    redis.call('SET', bucket, string.format('%.0f', c))
  end
  local next = KEYS[4] and redis.pcall('ZRANGE', KEYS[4], '0', '0')[1]
  if next then
    -- Its offer goes with its want, or a repair's owner would be granted the key again.
    if redis.pcall('ZREM', KEYS[4], ARGV[8]) == 1 then
      if KEYS[5] then
        redis.pcall('HDEL', KEYS[5], ARGV[8])
      end
      next = redis.pcall('ZRANGE', KEYS[4], '0', '0')[1]
    end
    if next then
      return {c, next}
    end
  end
  return c
end

if type(holder) == 'table' then
  return holder
end
if holder ~= ARGV[4] then
  -- A contender that was granted the key by its offer, and has not received that yet, no longer wants it.
  if KEYS[4] and ARGV[6] ~= '0' and not (ARGV[9] and string.sub(ARGV[9], -#holder - 1) == ' ' .. holder) then
    -- It keeps its place, unless its score is 0: then it did not take its turn, and goes to the end.
    local contender, place = ARGV[8], redis.pcall('ZSCORE', KEYS[4], ARGV[8])
    if not place or place == '0' then
      -- include last.lua
    else
      redis.pcall('PEXPIRE', KEYS[4], '10000')
    end
    if ARGV[9] and KEYS[5] then
      redis.pcall('HSET', KEYS[5], contender, ARGV[9])
      redis.pcall('PEXPIRE', KEYS[5], '10000')
    end
  end
  -- A recall. The holder may just be using the key again, or be gone: safety does not depend on it.
  if ARGV[6] ~= '0' and string.byte(holder, -1) == 82 and string.sub(holder, 1, 16) ~= 'flightlock:turn:' then
    local client = string.match(holder, '#([^#]*)%-%w*R$')
    if client then
      local contender = KEYS[4] and ARGV[8] or ''
      redis.pcall('PUBLISH', 'flightlock:inbox:' .. client,
        'recall: ' .. #holder .. ' ' .. #contender .. ' ' .. holder .. contender .. KEYS[1])
    end
  end
  return {holder, holder == 'flightlock:turn:' and 1 or redis.call('PTTL', KEYS[1])}
end

-- Never shorten a TTL: this may be a late copy of a request with a smaller one.
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[5]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
end
local top, more = ARGV[7] or 0, 0
-- include raise.lua
return -c
