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
--          be withdrawn, the contender, which owns no key
-- ARGV[5]  PUBLISH, to the inboxes of the clients concerned; or SPUBLISH on a Cluster, to all that
--          subscribe to the channel named as the key
-- ARGV[6]  how long a turn is kept, in milliseconds
-- ARGV[7]  contender: the one as which the owner waited, '' if it never had to wait. It no longer
--          wants the key
-- ARGV[8]  rival: the contender that is to be next, because the nodes must agree on one. The contender of
--          ARGV[7] then goes to the end of the wants, even if the key is not the owner's. May be left
--          out, or '': then the contender that has waited longest is next
-- ARGV[9]  an event for all that wait. failed: the work under the lock has failed. look: it may be
--          done. Left out, or '', there is no event, unless ARGV[7] is '' too: a lock that never had to
--          wait does not know who waits, so its release notifies all
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
-- process is gone, and the contender after it is next. (Or only its subscription is gone, so other wants of
-- its client are kept.)
--
-- A contender without an offer is given a turn, which it takes by an acquire. A turn is the key, held for
-- ARGV[6] in the name of the contender: "flightlock:turn:" and its name. Only that contender's acquire can
-- take it; if none arrives, the turn expires. A score of 0 among the wants marks a contender whose turn has
-- come. If it is still there when the next turn is made, the contender did not take its turn: it is removed,
-- and so are all other wants of its client.
-- No error that concerns wants may make a release fail.
--
-- Contenders are named label#client-number. A client has one inbox, the channel "flightlock:inbox:" and
-- its name. A message there is the contender's number and one word:
--   grant   and: token, the name of the node's epoch, 1 if a hundred others wait (else 0), the lengths
--           of the next two names, the offer up to its owner, the name of the contender that is next
--           after it, the owner, the key
--   turn    it is its turn
--   other   the turn is another's
--   failed  and the owner
-- The contender after the one whose turn it is is notified too: it tries when that turn has ended. All
-- contenders are notified instead if there is an event (ARGV[9]), if ARGV[7] is '', and if the last turn
-- was not taken: then the next contender may be gone as well. Otherwise no others are, however many wait.
--
-- On a Cluster, where PUBLISH knows the subscribers of one server only, the messages are the name of the
-- contender whose turn it is, and the owner and ' failed', which is the name of no contender.

local turn = 'flightlock:turn:'
local holder = redis.pcall('GET', KEYS[1])
local ours = holder == ARGV[4]

local contender = ARGV[7]
if contender == '' then
  contender = nil
end
local rival = ARGV[8]
if rival == '' then
  rival = nil
end
local kept = contender and holder == turn .. contender
local sharded = ARGV[5] == 'SPUBLISH'

-- A contender that yields continues to wait, at the end, even on a node where the key is no longer its own
-- or never was, because every node must have all wants.
local stays = rival and contender and ARGV[10] ~= 'leaves'

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

local function drop_offer(of)
  if KEYS[5] then
    redis.pcall('HDEL', KEYS[5], of)
  end
end

if stays then
  go_last()
  drop_offer(contender)
end

-- leave removes the want of a contender that no longer wants the key. If the key is passed on, that is done by
-- the command that removes the next contender's want: it is nearly always gone already.
local leaving = contender and not stays
local function leave()
  if leaving and redis.pcall('ZREM', KEYS[4], contender) == 1 then
    drop_offer(contender)
  end
  leaving = false
end
local name = ARGV[1] == '' and '-' or ARGV[1] -- of the epoch
local votes = name ~= '!' and KEYS[5] and contender and (ARGV[9] or '') == ''
if not ours or not votes then
  leave()
end

-- A rival that waits for a node on which the owner has no key is granted a free key there, as by an acquire of
-- its own. Otherwise all that follow would do without this node.
local free = not holder and rival and not stays

-- rejoin registers the contender with its next offer, and reports whether it did: not if it was granted the
-- key by that offer before, because this release is late.
local done = ours and 1 or 0
local function rejoin()
  if not contender or not ARGV[11] or string.sub(ARGV[11], -#(holder or '') - 1) == ' ' .. (holder or '') then
    return false
  end
  local made = redis.pcall('HSET', KEYS[5], contender, ARGV[11])
  redis.pcall('PEXPIRE', KEYS[5], '10000')
  if type(made) == 'table' or type(go_last()) ~= 'number' then
    return false
  end
  leaving, stays = false, true
  done = ours and 2 or 0
  return true
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

-- A failure is published before the turn: the last message that a client receives counts.
local failed = ours and ARGV[9] == 'failed'
if failed and sharded then
  redis.pcall('SPUBLISH', KEYS[1], ARGV[4] .. ' failed')
end

local first = redis.pcall('ZRANGE', KEYS[4], '0', '1', 'WITHSCORES') -- and the second
if leaving and (first[1] == contender or first[3] == contender or first[2] == '0') then
  leave()
  first = redis.pcall('ZRANGE', KEYS[4], '0', '1', 'WITHSCORES')
end
if not first[1] then -- nobody waits
  if holder then
    redis.call('DEL', KEYS[1])
  end
  return done
end
if not free and rejoin() and not first[3] then
  first[3] = contender
end

if votes then
  -- include epoch.lua
  votes = not changed
end

-- inbox_of is a contender's inbox and its number; nil if its name is of another form.
local function inbox_of(name)
  local client, number = string.match(name, '^.*#(.*)%-(%w+)$')
  if not client then -- no label
    client, number = string.match(name, '^(.*)%-(%w+)$')
  end
  return client and 'flightlock:inbox:' .. client, number
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
  local crowd = follower ~= '' and follower ~= contender and redis.pcall('ZRANGE', KEYS[4], '99', '99')[1] and 1 or 0
  return redis.pcall('PUBLISH', inbox, string.format('%s grant %.0f %s %d %d %d %s ', number, c, name, crowd, #follower,
    #owner, vote) .. follower .. owner .. KEYS[1])
end

if free then
  local score = votes and redis.pcall('ZSCORE', KEYS[4], rival)
  if type(score) == 'string' then
    local offer = take_offer(rival)
    if offer then
      redis.pcall('ZREM', KEYS[4], rival)
      local received = grant(rival, offer, first[rival == first[1] and 3 or 1] or '')
      if received == 0 or type(received) == 'table' then
        redis.call('DEL', KEYS[1])
      else
        rejoin()
      end
    end
  end
  return 0
end
-- tell publishes a message to a contender's inbox, and reports whether a client received it.
local function tell(name, message)
  local inbox, number = inbox_of(name)
  local n = inbox and redis.pcall('PUBLISH', inbox, number .. ' ' .. message)
  return type(n) == 'number' and n > 0
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

if failed and not sharded then
  tell_all('failed ' .. ARGV[4])
end

-- Contenders that did not take their turn are removed, with all wants of their clients. A hundred at most:
-- the server executes nothing else meanwhile.
local missed = first[2] == '0'
for _ = 1, 100 do
  local name = first[1]
  if not name or first[2] ~= '0' then
    break
  end
  redis.pcall('ZREM', KEYS[4], name)
  drop_offer(name)
  local client = string.match(name, '^(.*%-)')
  for _, other in ipairs(client and redis.pcall('ZRANGE', KEYS[4], '0', '99') or {}) do
    if string.sub(other, 1, #client) == client and not (stays and other == contender) then
      redis.pcall('ZREM', KEYS[4], other)
      drop_offer(other)
    end
  end
  first = redis.pcall('ZRANGE', KEYS[4], '0', '1', 'WITHSCORES')
end
local chosen = first[1]

if rival and rival ~= chosen and not (leaving and rival == contender) then
  local score = redis.pcall('ZSCORE', KEYS[4], rival)
  chosen = type(score) == 'string' and score ~= '0' and rival or chosen
end

if chosen and votes then
  for _ = 1, 100 do
    local offer = take_offer(chosen)
    if not offer then
      break -- it is given a turn
    end
    if leaving and redis.pcall('ZREM', KEYS[4], chosen, contender) == 2 then
      drop_offer(contender)
    elseif not leaving then
      redis.pcall('ZREM', KEYS[4], chosen)
    end
    leaving = false
    local received = grant(chosen, offer, first[chosen == first[1] and 3 or 1] or '')
    if type(received) == 'table' then -- refused
      redis.call('DEL', KEYS[1])
      return ours and 1 or 0 -- a contender that rejoins is to try again: the key is free
    elseif received > 0 then
      return done == 2 and 3 or done
    end
    first = redis.pcall('ZRANGE', KEYS[4], '0', '1', 'WITHSCORES')
    chosen = first[1]
    if not chosen then
      break
    end
  end
end

leave()
local made = chosen and redis.pcall('SET', KEYS[1], turn .. chosen, 'PX', ARGV[6])
if type(made) ~= 'table' or made.err then -- no room for a turn: the one that comes first has it
  redis.call('DEL', KEYS[1])
  done = ours and 1 or 0
end
if chosen then
  redis.pcall('ZADD', KEYS[4], 'XX', 0, chosen)
  if sharded then
    redis.pcall('SPUBLISH', KEYS[1], chosen)
    return done
  end
  tell(chosen, 'turn')
  if ours and ARGV[9] == 'look' or not contender or missed then
    tell_all('other', chosen)
  elseif first[3] and not tell(first[chosen == first[1] and 3 or 1], 'other') then
    for _, other in ipairs(redis.pcall('ZRANGE', KEYS[4], '0', '9')) do
      if other ~= chosen and tell(other, 'other') then
        break
      end
    end
  end
end
return done
