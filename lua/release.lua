-- release: takes our key away, and passes the turn on to whoever waits for it.
--
-- KEYS[1]  the lock key
-- KEYS[2]  the wants of that key: a sorted set of the contenders in other processes that
--          wait for it, by the time since when they do
-- ARGV[1]  owner, never '': a key with an empty value is another client's. If there is only a
--          want to be taken back, the contender, which owns no key
-- ARGV[2]  PUBLISH, or SPUBLISH on a Cluster
-- ARGV[3]  how long a turn is kept, in milliseconds
-- ARGV[4]  contender: the one that the owner asked as, '' if it never had to wait. It does
--          not want the key any more
-- ARGV[5]  rival: the contender whose turn it is to be, because the nodes must agree on
--          one. The contender of ARGV[4] goes to the end of the wants, even where the key is
--          not the owner's. May be left out, or '':
--          then the one that waits longest comes next
-- ARGV[6]  failed: what the lock was held for has failed. All who listen are told so, whoever is next,
--          by a message of its own: the owner and ' failed', which is the name of no contender.
--          Left out by all other releases
--
-- Reply
--   1                deleted
--   0                missing: there is no such key
--   {holder, pttl}   another's; it was left alone
--   error            as for acquire
--
-- A turn is the key, held for ARGV[3] in the name of a contender: "flightlock:turn:" and
-- the contender. Nobody but that contender's acquire can take it; if it does not come, the
-- turn ends by itself. The contender is told by a message on the channel named as the key,
-- to all who listen: its name. A score of 0 among the wants is a contender whose turn has
-- come. One that is found there when the next turn is made did not come: it is gone, and
-- so is whatever else its client wanted ("client-sequence" is how contenders are named).
-- Nothing about wants may make a release fail.

local turn = 'flightlock:turn:'
local holder = redis.pcall('GET', KEYS[1])
local ours, kept = holder == ARGV[1], false

local contender = ARGV[4]
if contender == '' then
  contender = nil
end
local rival = ARGV[5]
if rival == '' then
  rival = nil
end
kept = contender and holder == turn .. contender

-- One that yields goes on waiting, at the end: also where the key is not its own any more, or never
-- was, for each node must know all that wait.
if rival and contender then
  local t = redis.call('TIME')
  redis.pcall('ZADD', KEYS[2], string.format('%.0f', t[1] * 1000000 + t[2]), contender)
  redis.pcall('PEXPIRE', KEYS[2], 10000)
elseif contender then
  redis.pcall('ZREM', KEYS[2], contender)
end

if not ours and not kept then
  if not holder then
    return 0
  end
  if type(holder) == 'table' then
    return holder
  end
  return {holder, redis.call('PTTL', KEYS[1])}
end

-- It comes before the message of whose turn it is: to a client that knows nothing of failures it is
-- the turn of one that it does not know, and what it hears last counts.
if ours and ARGV[6] then
  redis.pcall(ARGV[2], KEYS[1], ARGV[1] .. ' failed')
end

if not rival and redis.pcall('EXISTS', KEYS[2]) ~= 1 then -- nobody waits
  redis.call('DEL', KEYS[1])
  return ours and 1 or 0
end
local first = redis.pcall('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')

-- Those that did not take their turn are removed, not more than a few hundred at a time:
-- the server does nothing else meanwhile.
for _ = 1, 100 do
  local name = first[1]
  if not name or first[2] ~= '0' then
    break
  end
  redis.pcall('ZREM', KEYS[2], name)
  local client = string.match(name, '^(.*%-)')
  for _, other in ipairs(client and redis.pcall('ZRANGE', KEYS[2], 0, 99) or {}) do
    if string.sub(other, 1, #client) == client and not (rival and other == contender) then
      redis.pcall('ZREM', KEYS[2], other)
    end
  end
  first = redis.pcall('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
end
local chosen = first[1]

if rival and rival ~= chosen then
  local score = redis.pcall('ZSCORE', KEYS[2], rival)
  chosen = type(score) == 'string' and score ~= '0' and rival or chosen
end

local made = chosen and redis.pcall('SET', KEYS[1], turn .. chosen, 'PX', ARGV[3])
if type(made) ~= 'table' or made.err then -- no room for a turn: whoever comes first has it
  redis.call('DEL', KEYS[1])
end
if chosen then
  redis.pcall('ZADD', KEYS[2], 'XX', 0, chosen)
  redis.pcall(ARGV[2], KEYS[1], chosen)
end
return ours and 1 or 0
