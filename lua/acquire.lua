-- acquire: one node's vote for a lease. Idempotent: the same owner may ask again.
--
-- KEYS[1]  the lock key; holds the owner, a plain string with a TTL
-- KEYS[2]  the fence bucket of that key: a counter that never expires. Left out where a Cluster
--          may have the two apart, while it moves their slot: see ARGV[6]
-- KEYS[3]  the wants of that key (see release.lua); with ARGV[5] only. Left out where a Cluster
--          may have them apart: then it gets no place among them
-- ARGV[1]  owner: unique per attempt
-- ARGV[2]  ttl in milliseconds, at least 1
-- ARGV[3]  B, the size of the block of fencing tokens; 0 for a repair
-- ARGV[4]  repairs: the highest token the lease has reserved; else 0 or left out
-- ARGV[5]  contender: who waits for the key, for as long as it takes. It takes over a turn
--          that is kept for it; if the key is another's, it gets its place among the wants
-- ARGV[6]  without KEYS[2]: the name of the fence bucket, which may be here all the same
--
-- Reply
--   c > 0            granted; the counter is now c and this node offers (c-B, c]
--   -c < 0           this very owner held the key already: its TTL is full again, the
--                    counter stands at c and was not bumped (nobody can have been
--                    granted a later token of this key meanwhile)
--   {holder, pttl}   held by another, or kept for another's turn; pttl in milliseconds,
--                    below 0 when unknown
--   EPOCH            an error: see below; nothing was written
--   TRYAGAIN         an error, without KEYS[2]: the bucket is not here; nothing was written
--   error            WRONGTYPE when the key holds something that is not a string, what
--                    INCRBY says of a bucket that is not a counter, or what the server
--                    says of its own state (OOM, READONLY, ...); nothing was written
--
-- A holder that ends with R is of a client that may retain the key: keep it although nobody in its
-- process holds it. Each acquire that meets it publishes a recall to that client's inbox (see
-- release.lua): "recall: LENGTH LENGTH " and then holder, contender and key, without anything in
-- between. The lengths are those of the holder and of the contender, 0 if none is registered. A repair
-- wants nothing, and recalls nothing; nor does an acquire without KEYS[2], on a Cluster, where no client
-- retains.
--
-- A bucket that is missing (first use, flush, empty restart) starts at the node's own
-- clock in microseconds, so that tokens go on rising although the count was lost. One that
-- is there, but of a time before the node's epoch began (a restart with old data), goes on
-- above the microsecond in which that was.
--
-- Six locals stand before this text (see lua.go). epoch is the name of the node's epoch (see boot.lua),
-- or false where that does not matter. A node that was flushed since, or restarted, has another name in
-- its marker: boot.lua must run before it is asked for a vote. The next four make the strict check that a
-- client makes now and then; those that need no check are false, or nil if the client does not know them.
-- raw: the marker is raw as long as this process has not read it from a dump, by which it would lose what
-- was not in there. run: the process; '' checks whether the client may see it by now, for then boot.lua
-- compares more. promoted and offset: what INFO reports of when the process was last promoted, to find
-- one that stepped down for another meanwhile, and lost what that one was sent. (Zeros: never, or it has
-- had no replica for so long that it does not know any more.) A client that may not see the process checks
-- raw each time; before Redis 7, where servers hand scripts on to replicas and to the process after a
-- restart, all clients check run each time. floor is when the epoch began, in microseconds of the node's
-- clock, or 0.
--
-- Numbers stay below 2^53; '%.0f' because Lua prints large ones in exponents.

local changed = epoch and redis.call('GET', 'flightlock:{boot}') ~= epoch
  or raw and redis.pcall('OBJECT', 'ENCODING', 'flightlock:{boot}') ~= 'raw' -- or not allowed any more
if run and not changed then
  local text
  if promoted then
    text = redis.pcall('INFO', 'server', 'replication')
    if type(text) ~= 'string' then -- before Redis 7 one section at a time
      local server, replication = redis.pcall('INFO', 'server'), redis.pcall('INFO', 'replication')
      text = type(server) == 'string' and type(replication) == 'string' and server .. replication
    end
  else
    text = redis.pcall('INFO', 'server')
  end
  local function says(line) return string.find(text, line, 1, true) end
  if run == '' then
    changed = type(text) == 'string' and string.find(text, 'run_id:%w')
  else
    changed = type(text) ~= 'string' or not says(run) -- or not allowed any more
      or promoted and (says('role:slave')
        or not (says(promoted) and says(offset) or says('master_replid2:0000000000000000000000000000000000000000')))
  end
end
if changed then
  return {err = 'EPOCH the epoch of this node is not ' .. (epoch or 'what it was') .. ', or this user may now see more of it'}
end
epoch, raw, run, promoted = false, false, false, false -- for the rest of a batch: a script is atomic

local bucket = KEYS[2]
if not bucket then
  local holder = redis.pcall('GET', KEYS[1])
  if type(holder) == 'table' then
    return holder
  end
  if holder and holder ~= ARGV[1] and holder ~= 'flightlock:turn:' .. (ARGV[5] or '') then
    return {holder, redis.call('PTTL', KEYS[1])}
  end
  bucket = ARGV[6]
  if not bucket or redis.pcall('EXISTS', bucket) ~= 1 then
    return {err = 'TRYAGAIN the key and its fence bucket are apart, while their slot moves'}
  end
end

local holder, granted = false, false
if ARGV[5] then
  holder = redis.pcall('GET', KEYS[1])
  if not holder or holder == 'flightlock:turn:' .. ARGV[5] then
    granted = redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  end
else
  granted = redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2], 'NX')
  if not granted then
    holder = redis.pcall('GET', KEYS[1])
  end
end

if granted then
  local block = tonumber(ARGV[3])
  local c = redis.pcall('INCRBY', bucket, ARGV[3])
  if type(c) == 'table' then -- the bucket is no counter: take the vote back
    redis.call('DEL', KEYS[1])
    return c
  end
  if c <= block then
    local t = redis.pcall('TIME')
    if t.err then -- not allowed: a bucket that began at 0 would be taken for one that was never lost
      redis.call('DEL', KEYS[1], bucket)
      return t
    end
    c = t[1] * 1000000 + t[2] + block
    redis.call('SET', bucket, string.format('%.0f', c))
  end
  if c < floor + block then
    c = floor + block
    redis.call('SET', bucket, string.format('%.0f', c))
  end
  if ARGV[4] and c < tonumber(ARGV[4]) then
    c = tonumber(ARGV[4])
    redis.call('SET', bucket, string.format('%.0f', c))
  end
  if KEYS[3] then
    redis.pcall('ZREM', KEYS[3], ARGV[5])
  end
  return c
end

if type(holder) == 'table' then
  return holder
end
if holder ~= ARGV[1] then
  if KEYS[3] and ARGV[3] ~= '0' then
    -- It keeps its place, unless the clock went back: then that may be far behind. A score
    -- of 0 says that its turn came and it was not there: it begins anew.
    local t = redis.call('TIME')
    local now = string.format('%.0f', t[1] * 1000000 + t[2])
    if redis.pcall('ZADD', KEYS[3], 'LT', now, ARGV[5]) == 0 and redis.pcall('ZSCORE', KEYS[3], ARGV[5]) == '0' then
      redis.pcall('ZADD', KEYS[3], now, ARGV[5])
    end
    redis.pcall('PEXPIRE', KEYS[3], 10000)
  end
  -- A recall. Its holder may be on the way to use the key, or be gone: nothing depends on it.
  if ARGV[3] ~= '0' and string.byte(holder, -1) == 82 and string.sub(holder, 1, 16) ~= 'flightlock:turn:' then
    local client = string.match(holder, '#([^#]*)%-%w*R$')
    if client then
      local contender = KEYS[3] and ARGV[5] or ''
      redis.pcall('PUBLISH', 'flightlock:inbox:' .. client,
        'recall: ' .. #holder .. ' ' .. #contender .. ' ' .. holder .. contender .. KEYS[1])
    end
  end
  return {holder, redis.call('PTTL', KEYS[1])}
end

-- Never shorten a TTL: this may be a late copy of a request with a smaller one.
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
local c = tonumber(redis.call('GET', bucket) or 0)
local reserved = tonumber(ARGV[4] or 0)
if c <= 0 then
  local t = redis.call('TIME')
  c = t[1] * 1000000 + t[2]
  redis.call('SET', bucket, string.format('%.0f', math.max(c, reserved)))
elseif c < reserved then
  redis.call('SET', bucket, string.format('%.0f', reserved))
end
return -math.max(c, reserved)
