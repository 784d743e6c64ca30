-- boot: reports a node's epoch, the period in which it has lost no data, so that a vote of a node that may
-- have lost locks is not counted. It runs at the beginning of each connection, when the node does not know
-- the acquire script (which has the process in its text), when that script found another epoch, and
-- when a quarantine may be over. Not on a Cluster.
--
-- KEYS[1]  flightlock:{boot}, the marker: the name of the epoch
-- KEYS[2]  flightlock:{boot}:past: "name state since process promoted how" of that epoch
-- ARGV[1]  a name for an epoch that begins now: letters, digits and -, lua.MaxName of them at most, never
--          used before
-- ARGV[2]  how long a node that lost data has no vote, in microseconds
-- ARGV[3]  the name of an epoch that is to be established because no node of the quorum ever was; '' for
--          none
-- ARGV[4]  1: the caller has seen an epoch of this node that was established, or lost; else 0. So a node
--          without one has lost its data, and says that to clients that never met it as well
-- ARGV[5]  the name of an epoch that has no vote, and began longer ago than ARGV[2] by the caller's clock;
--          '' for none. The node's own clock may stand still
--
-- Reply: {name, state, age, process, version, why, since, raw, promoted}
--   name     of the epoch. It changes when data was lost
--   state    new: the marker was missing, and the caller never saw one: the node is new, or lost all data
--            lost: the marker is missing though there was one; or it is of another process, or of a time
--            before the node was last promoted, or it was read from a dump: what happened since may have
--            been lost
--            kept: established. Only such a node votes
--   age      since the epoch began, in microseconds of the node's clock
--   process  which process it is, '' if that cannot be seen: its run_id, or PID@START where the server has
--            none
--   version  of the server, after its name and a space if it is not Redis itself; '' if it cannot be seen
--   why      the error of INFO, if it is refused: then a client that relies on the quarantine counts no vote of the
--            node, nor if process is ''
--   since    when the epoch began, in microseconds of the node's clock: no counter that is lower is of
--            that epoch
--   raw      1: the acquire script may rely on the marker being raw; else 0
--   promoted when the node was last promoted, '-' if never, '' if that cannot be seen
--
-- A node that is no master has no epoch to report: that is an error, READONLY.
--
-- How a loss is noticed, and how not, is in docs/guarantees.md, "Nodes that lose data". Beyond that:
--   - The ids of a node that never was a replica change with its own replicas and mean nothing: zeros.
--   - The second in which a process began is computed from its uptime and may be wrong by one. It also decides in
--     an epoch that only clients without INFO have seen: the epoch is this process's own if that began in an earlier
--     second, and never was a replica. Where PID@START is the process, an epoch is not established in the first
--     seconds, since a process that restarts meanwhile could not be told from it.
--   - A string that SET began and APPEND ended is raw; a short one that was set as a whole, or read from a dump, is
--     not. Where "short" ends depends on the server, so both are tried. how is raw if it was seen to be so, and plain
--     if the server always says raw, or never, or the client that wrote the marker may not APPEND or ask: then its
--     encoding means nothing, until a client with these rights has written it again. One that may not ask must not
--     write a marker that is said to be raw: it may not be so any more.

local why = ''
local function info(section)
  local text = redis.pcall('INFO', section)
  if type(text) == 'string' then
    return text
  end
  why = text and text.err or why
  return ''
end
local function word(text, name)
  return string.match(text, name .. ':([^\r\n]+)')
end

local server, replication = info('server'), info('replication')
local role = word(replication, 'role') or 'master'
if role ~= 'master' then -- a replica, or such as active-replica, of which several accept writes
  return {err = 'READONLY the role of the node is ' .. role .. ', and only a master can vote'}
end

local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local second = math.floor(now / 1000000)
local up, pid = word(server, 'uptime_in_seconds'), word(server, 'process_id')
local at = word(server, 'server_time_usec') or now -- its clock as of up
local begun = up and math.floor(at / 1000000) - up -- the second in which the process began
local self, version = word(server, 'run_id') or '', word(server, 'redis_version') or ''
for _, name in ipairs({'Valkey', 'Dragonfly'}) do -- which have a redis_version, too
  local own = word(server, string.lower(name) .. '_version')
  version = own and name .. ' ' .. own or version
end
local byStart = self == '' and begun and pid -- no run_id
if byStart then
  self = string.format('%s@%.0f', pid, begun)
end
local run = self ~= '' and self or '-'
local from, offset = word(replication, 'master_replid2'), word(replication, 'second_repl_offset')
if run == '-' then -- a client that does not see both cannot compare
  from = nil
end
local promoted = '-'
if from and offset and string.find(from, '[^0]') then
  promoted = from .. ':' .. offset
end

local marker, past = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2]) or ''
local of, state, since, ran, rose, how = string.match(past, '^([%w-]+) (%l+) (%d+) (%S+) (%S+) (%l+)$')
since = tonumber(since)
local known = ARGV[4] == '1'

local function another() -- whether the marker is of another process
  local ranPID, ranBegun = string.match(ran, '^(%d+)@(%d+)$')
  return not (byStart and pid == ranPID and math.abs(begun - ranBegun) <= 2)
end
local function encoding() -- a table if it is refused
  return redis.pcall('OBJECT', 'ENCODING', KEYS[1])
end
local name, dumped = marker, false
if marker and how == 'raw' then
  local now = encoding()
  dumped = type(now) == 'string' and now ~= 'raw'
end

if not name or of ~= name then -- first use, flushed, or restarted empty
  name, state, since = ARGV[1], known and 'lost' or 'new', now
elseif dumped or run ~= '-' and (ran ~= '-' and run ~= ran and another() or promoted ~= '-' and promoted ~= rose
    or ran == '-' and (begun or math.huge) >= math.floor(since / 1000000)) then
  name, since = ARGV[1], now
  if state ~= 'new' or known then -- else it never had a vote, so there is nothing that could be missed
    state = 'lost'
  end
else
  if run == '-' then -- a client that sees it compares again
    run = ran
  end
  if promoted == '-' then
    promoted = rose
  end
  since = math.min(since, now) -- the clock was set back
  if state == 'new' and known then
    state = 'lost'
  end
  if state ~= 'kept' and not (byStart and second - begun < 5) and (now - since >= tonumber(ARGV[2]) or ARGV[5] == name
      or state == 'new' and ARGV[3] == name) then
    state = 'kept'
  end
end

if name ~= marker or how ~= 'raw' then
  redis.call('SET', KEYS[1], name)
  local whole = encoding() -- as from a dump
  redis.call('SET', KEYS[1], string.sub(name, 1, -2))
  if type(redis.pcall('APPEND', KEYS[1], string.sub(name, -1))) == 'table' then -- it may not
    redis.call('SET', KEYS[1], name)
  end
  how = type(whole) == 'string' and whole ~= 'raw' and encoding() == 'raw' and 'raw' or 'plain'
end
local value = table.concat({name, state, string.format('%.0f', since), run, promoted, how}, ' ')
if value ~= past then
  redis.call('SET', KEYS[2], value)
end
local seen = how == 'raw' and encoding() == 'raw' and 1 or 0
return {name, state, now - since, self, version, why, since, seen, from and offset and promoted or ''}
