-- epoch: a part of acquire and release, which replaces "-- include epoch.lua". It sets changed if the
-- node must not grant anything, because its data may not be that of the epoch that the caller knows; to an
-- error, if the marker cannot be read.
--
-- KEYS[3]  the marker, flightlock:{boot}, if ARGV[1] is the name of an epoch; else any key of the call
-- ARGV[1]  the name of the node's epoch (see boot.lua), or '' where that does not matter. A node that was flushed
--          since, or restarted, has another name in its marker: boot.lua must run before its vote counts
-- ARGV[2]  floor: when the epoch began, in microseconds of the node's clock, or 0
-- ARGV[3]  '', or what else to check, four words of which each may be '-': "raw process promoted offset". That is
--          the strict check that a client makes now and then (docs/guarantees.md, "Nodes that lose data").
--          raw: the marker is raw, so this process has not read it from a dump. process: as boot.lua reports it.
--          promoted and offset: what INFO reports of when the process was last promoted; two other words if it
--          never was. (Zeros: never, or so long ago that it does not know any more)
--
-- The process that the text of the script names (see lua.go) needs no check: no other one knows the script. Before
-- Redis 7, where servers hand scripts on, it is checked each time.

local changed = false
if ARGV[1] ~= '' then
  local marker = redis.pcall('GET', KEYS[3])
  changed = type(marker) == 'table' and marker or marker ~= ARGV[1]
end
if ARGV[3] ~= '' and not changed then
  local raw, run, promoted, offset = string.match(ARGV[3], '^(%S+) (%S+) (%S+) (%S+)$')
  changed = raw ~= '-' and redis.pcall('OBJECT', 'ENCODING', KEYS[3]) ~= 'raw' -- or not allowed any more
  if run ~= '-' and not changed then
    local text = redis.pcall('INFO', 'server')
    if promoted ~= '-' and type(text) == 'string' then -- before Redis 7 one section at a time
      local replication = redis.pcall('INFO', 'replication')
      text = type(replication) == 'string' and text .. replication
    end
    local function says(line) return string.find(text, line, 1, true) end
    local pid, begun = string.match(run, '^(%d+)@(%d+)$')
    if type(text) ~= 'string' then -- not allowed any more
      changed = true
    elseif pid then
      local up = string.match(text, 'uptime_in_seconds:(%d+)')
      changed = not up or not says('process_id:' .. pid .. '\r')
        or math.abs((redis.pcall('TIME')[1] or math.huge) - up - begun) > 2
    else
      changed = not says(run)
    end
    if promoted ~= '-' and not changed then
      changed = not says('role:master\r')
        or not (says('master_replid2:' .. promoted .. '\r\n') and says('second_repl_offset:' .. offset .. '\r\n')
          or says('master_replid2:' .. string.rep('0', 40)))
    end
  end
end
