-- release: deletes our key, or passes it on to the next contender that waits for it.
--
-- KEYS[1]  the lock key
-- KEYS[2]  the fence bucket of that key, if KEYS[5] is there; else any key of the call
-- KEYS[3]  the marker of the node's epoch, if ARGV[1] names one; else any key of the call
-- KEYS[4]  the wants of that key: a sorted set of the contenders in other processes that
--          wait for it, in the order of their scores, each of which is one more than the last
-- KEYS[5]  the offers of that key: a hash, by contender. Left out: nobody is granted the key, see below
-- ARGV[1] to [3]  the node's epoch: see epoch.lua. If the first is '!', nobody is granted the key
-- ARGV[4]  owner, never '': a key with an empty value is another client's. If only a want is to
--          be withdrawn, one that nobody is: not the contender, whose name may be that of a detached lease
-- ARGV[5]  PUBLISH, to the inboxes of the clients concerned; or SPUBLISH on a Cluster, to all that
--          subscribe to the channel named as the key
-- ARGV[6]  how long a turn is kept, in milliseconds
-- ARGV[7]  contender: the one as which the owner waited, '' if it never had to wait. It no longer
--          wants the key
-- ARGV[8]  rival: the contender that is to be next, because the nodes must agree on one. The contender of
--          ARGV[7] then goes to the end of the wants, even if the key is not the owner's. May be left
--          out, or '': then the contender that has waited longest is next
-- ARGV[9]  an event for all that wait. failed: the work under the lock has failed. look: it may be
--          done. Left out, or '': there is none
-- ARGV[10] leaves, with a rival: the contender of ARGV[7] nevertheless no longer wants the key. May be
--          left out
-- ARGV[11] rejoins, with leaves: an offer of the contender of ARGV[7], which wants the key again: if the key
--          is another's from now on, it goes to the end of the wants, with this offer. If nobody else waits,
--          the key is deleted, and nobody wants it. May be left out
--
-- Reply
--   1                deleted, or passed on
--   2                the same, and the contender that rejoins waits
--   3                the same, and another contender was granted the key: so the node is in the caller's epoch
--   0                missing: there was no such key, and its rival may have been granted it, see below; or
--                    it was kept for a turn of the contender of ARGV[7], and was passed on
--   {holder, pttl}   another owner's; the key was not changed. The wants may have been: the contender of
--                    ARGV[7] has left them, or has gone to their end (ARGV[8], ARGV[11])
--   error            as for acquire
--
-- What the key is when the script begins, by the names of the variables below, and what is done with it:
--   ours    the owner's              deleted, or passed on to the next contender: by a grant or a turn
--   kept    kept for a turn of the   passed on likewise, for that turn will not be taken
--           contender of ARGV[7]
--   free    not there, with a rival  granted to the rival if it has an offer; else it stays free
--   else    not there, or another's  stays as it is
-- In every case the contender of ARGV[7] leaves the wants, or goes to their end (stays).
--
-- The next contender is granted the key if it has made an offer that names the node's epoch. An offer is kept
-- beside the contender's want, until ten seconds after the last one that anybody has made: "k node span block
-- epoch owner". k is the number of the contender's poll, and node that of this node among the client's nodes;
-- epoch is '-' if it does not matter. No offer of another epoch is granted: a node that came back with old
-- data may have granted it before, and a client must hold no key that a node gave it in an epoch unknown to
-- the client. With the grant the key is the offer's owner's, for span milliseconds and with block tokens, as
-- if it had been acquired; the contender's want is removed; and the vote, with k and node, is published to
-- the contender's inbox. A release grants nothing if the node may not vote (see epoch.lua), nor if it has an
-- event: then most contenders may no longer need the key. If no client received the message, the contender's
-- process is gone, and the contender after it is next.
--
-- A contender without an offer is given a turn, which it takes by an acquire. A turn is the key, held for
-- ARGV[6] in the name of the contender: "flightlock:turn:" and its name. Only that contender's acquire can
-- take it; if none arrives, the turn expires. A score of 0 among the wants marks a contender whose turn has
-- come. If it is still there when it would be next again, the contender did not take its turn: it is removed, and
-- the one after it is next.
-- No error that concerns wants may make a release fail.
--
-- Contenders are named label#client-number. A client has one inbox, the channel "flightlock:inbox:" and
-- its name. A message there is the contender's number and one word:
--   grant   and: token, the name of the node's epoch, 0 (for clients of before 2026-11-29), the lengths of the
--           next two names, the offer up to its owner, the name of the contender that is next after it, the
--           owner, the key
--   turn    it is its turn
--   other   the turn is another's
--   failed  and the owner
-- The contender after the one whose turn it is is notified too: it tries when that turn has ended. With an
-- event (ARGV[9]) all are. Nobody else is notified of anything, however many wait.
--
-- On a Cluster, where PUBLISH knows the subscribers of one server only, the messages are the name of the
-- contender whose turn it is, and the owner and ' failed', which is the name of no contender.

local holder = redis.pcall('GET', KEYS[1])
local ours = holder == ARGV[4]
local function given(arg) return arg ~= '' and arg or nil end
local contender, rival, event = given(ARGV[7]), given(ARGV[8]), given(ARGV[9])
local kept = contender and holder == 'flightlock:turn:' .. contender
local sharded = ARGV[5] == 'SPUBLISH'

-- A contender that yields continues to wait, at the end, even on a node where the key is no longer its own
-- or never was, because every node must have all wants.
local stays = rival and contender and ARGV[10] ~= 'leaves'

-- A rival that waits for a node on which the owner has no key is granted a free key there, as by an acquire of
-- its own. Otherwise all that follow would do without this node.
local free = not holder and rival and not stays

-- The usual case: nobody waits.
if ours and not stays and not sharded and redis.pcall('EXISTS', KEYS[4]) == 0 then
  redis.call('DEL', KEYS[1])
  return 1
end

-- go_last puts the contender at the end of the wants, and returns what ZADD says.
local function go_last()
  -- include last.lua
  return added
end

-- drop removes a want with its offer.
local function drop(of)
  if redis.pcall('ZREM', KEYS[4], of) == 1 and KEYS[5] then
    redis.pcall('HDEL', KEYS[5], of)
  end
end

if contender then
  drop(contender)
end
if stays then
  go_last()
end

-- rejoin registers the contender with its next offer: not if it was granted the key by that offer before, because
-- this release is late.
local done = ours and 1 or 0
local function rejoin()
  if not contender or not ARGV[11] or string.sub(ARGV[11], -#(holder or '') - 1) == ' ' .. (holder or '') then
    return
  end
  local made = redis.pcall('HSET', KEYS[5], contender, ARGV[11])
  redis.pcall('PEXPIRE', KEYS[5], '10000')
  if type(made) ~= 'table' and type(go_last()) == 'number' then
    done = ours and 2 or 0
  end
end

if not ours and not kept and not free then
  if not holder then
    return 0
  end
  if type(holder) == 'table' then
    return holder
  end
  rejoin()
  return {holder, redis.call('PTTL', KEYS[1])}
end

-- inbox_of is a contender's inbox and its number; nil if its name is of another form.
local function inbox_of(name)
  local client, number = string.match(name, '^.*#(.*)%-(%w+)$')
  if not client then -- no label
    client, number = string.match(name, '^(.*)%-(%w+)$')
  end
  return client and 'flightlock:inbox:' .. client, number
end

-- tell publishes a message to a contender's inbox.
local function tell(name, message)
  local inbox, number = inbox_of(name)
  if inbox then
    redis.pcall('PUBLISH', inbox, number .. ' ' .. message)
  end
end

-- tell_all publishes it to all contenders but one, a thousand at most: the server executes nothing else
-- meanwhile.
local function tell_all(message, but)
  for _, name in ipairs(redis.pcall('ZRANGE', KEYS[4], '0', '999')) do
    if name ~= but then
      tell(name, message)
    end
  end
end

-- A failure is published first: the last message that a client receives counts.
if ours and event == 'failed' then
  if sharded then
    redis.pcall('SPUBLISH', KEYS[1], ARGV[4] .. ' failed')
  else
    tell_all('failed ' .. ARGV[4])
  end
end

-- first is the contender that has waited longest, and its score.
local first = redis.pcall('ZRANGE', KEYS[4], '0', '0', 'WITHSCORES')
if first[1] and not free then
  rejoin()
end

local name = ARGV[1] == '' and '-' or ARGV[1] -- of the epoch
local votes = first[1] and name ~= '!' and KEYS[5] and not event
if votes then
  -- include epoch.lua
  votes = not changed
end

-- take_offer removes and returns the contender's offer; nil if there is none of this epoch.
local function take_offer(of)
  local offer = redis.pcall('HGET', KEYS[5], of)
  if type(offer) ~= 'string' or redis.pcall('HDEL', KEYS[5], of) ~= 1 then
    return nil
  end
  return string.match(offer, '^%w+ %w+ %d+ %d+ (%S+) ') == name and offer or nil
end

-- grant gives the key to the contender that has made the offer, and returns how many clients received the
-- message, or the error that prevented it.
local function grant(to, offer, follower)
  local vote, span, size, owner = string.match(offer, '^(%w+ %w+ (%d+) (%d+)) %S+ (.*)$')
  local inbox, number = inbox_of(to)
  if not vote or not inbox then
    return 0
  end
  local bucket, block = KEYS[2], tonumber(size)
  -- include reserve.lua
  if type(c) == 'table' then
    return c
  end
  local made = redis.pcall('SET', KEYS[1], owner, 'PX', span)
  if made.err then
    return made
  end
  return redis.pcall('PUBLISH', inbox, string.format('%s grant %.0f %s 0 %d %d %s ', number, c, name, #follower,
    #owner, vote) .. follower .. owner .. KEYS[1])
end

-- The contender that is next; and if that is gone, the one after it. A hundred at most: the server executes nothing
-- else meanwhile.
local chosen, score = first[1], first[2]
if rival then
  local waits = redis.pcall('ZSCORE', KEYS[4], rival)
  if type(waits) == 'string' then
    chosen, score = rival, waits
  elseif free then
    chosen = nil
  end
end
for _ = 1, 100 do
  local offer = chosen and votes and take_offer(chosen)
  if not offer and (not chosen or free or score ~= '0') then
    break
  end
  if offer then -- which is taken
    redis.pcall('ZREM', KEYS[4], chosen)
  else
    drop(chosen)
  end
  first = redis.pcall('ZRANGE', KEYS[4], '0', '0', 'WITHSCORES')
  local received = offer and grant(chosen, offer, first[1] or '') or 0
  if type(received) == 'table' then -- refused
    redis.call('DEL', KEYS[1])
    return ours and 1 or 0 -- a contender that rejoins is to try again: the key is free
  elseif received > 0 then
    if free then
      rejoin()
    end
    return done == 2 and 3 or done
  end
  chosen, score = not free and first[1], first[2]
end

local made = chosen and not free and redis.pcall('SET', KEYS[1], 'flightlock:turn:' .. chosen, 'PX', ARGV[6])
if type(made) ~= 'table' or made.err then -- or no room for a turn: the one that comes first has the key
  redis.call('DEL', KEYS[1])
  done = ours and 1 or 0
end
if not chosen or free then
  return done
end
redis.pcall('ZADD', KEYS[4], 'XX', 0, chosen)
if sharded then
  redis.pcall('SPUBLISH', KEYS[1], chosen)
  return done
end
tell(chosen, 'turn')
if event == 'look' then
  tell_all('other', chosen)
else
  local two = redis.pcall('ZRANGE', KEYS[4], '0', '1')
  local second = two[two[1] == chosen and 2 or 1]
  if second then
    tell(second, 'other')
  end
end
return done
