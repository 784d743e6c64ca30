-- epoch: a part of acquire and release, which replaces "-- include epoch.lua". It sets changed if the
-- node must not grant anything, because its data may not be that of the epoch in the script's text; to an
-- error, if the marker cannot be read.
--
-- Seven locals precede the script (see lua.go). epoch is the name of the node's epoch (see boot.lua),
-- or false where that does not matter. A node that was flushed since, or restarted, has another name in
-- its marker: boot.lua must run before its vote counts. The next four make the strict check that a
-- client makes now and then; those that need no check are false, or nil if the client does not know them.
-- raw: the marker is raw as long as this process has not read it from a dump, by which it would lose what
-- was not in there. run: the process, as boot.lua reports it; '' checks whether the client may see it by
-- now, for then boot.lua compares more. promoted and offset: what INFO reports of when the process was last promoted, to find
-- one that stepped down for another meanwhile, and lost what that one was sent. (Zeros: never, or it has
-- had no replica for so long that it does not know any more.) A client that may not see the process checks
-- raw each time; before Redis 7, where servers hand scripts on to replicas and to the process after a
-- restart, all clients check run each time. floor is when the epoch began, in microseconds of the node's
-- clock, or 0. name is the epoch's, for the message about a grant: '-' if the epoch does not matter, and
-- false if a release must not grant.

local marker = epoch and redis.pcall('GET', 'flightlock:{boot}')
local changed = type(marker) == 'table' and marker or marker ~= epoch
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
  local pid, begun = string.match(run, '^(%d+)@(%d+)$')
  if run == '' then
    changed = type(text) == 'string' and (string.find(text, 'run_id:%w') or says('process_id:') and says('uptime_in_seconds:'))
  elseif type(text) ~= 'string' then -- not allowed any more
    changed = true
  elseif pid then
    local up = string.match(text, 'uptime_in_seconds:(%d+)')
    changed = not up or not says('process_id:' .. pid .. '\r') or math.abs(redis.pcall('TIME')[1] - up - begun) > 2
  else
    changed = not says(run)
  end
  if promoted and not changed then
    changed = not says('role:master\r')
      or not (says(promoted) and says(offset) or says('master_replid2:0000000000000000000000000000000000000000'))
  end
end
