-- rlock: one node's vote for a read lease. A key that other readers share is joined, unless somebody who wants it for
-- itself waits before the contender: so a stream of readers ends when a writer comes. Any other key is acquired as by
-- acquire.lua, and shared then. Idempotent, as that.
--
-- KEYS and ARGV as in acquire.lua, with two more keys: see readers.lua
--
-- Reply as acquire.lua. The holder of a key that is shared is the reserved owner.

local owner = ARGV[4]
-- include readers.lua
-- include share.lua
-- include epoch.lua

-- may_join reports whether nobody but readers waits before the contender. A repair is of a lease that is held already.
local function may_join()
  if ARGV[6] == '0' then
    return true
  end
  local names = redis.pcall('ZRANGE', waiting, '0', '99')
  for _, name in ipairs(names) do
    if name == ARGV[8] then
      return true
    end
    if string.byte(name, -1) ~= 83 then
      return false
    end
  end
  return #names < 100
end

if held == shared and not changed and (mine or may_join()) then
  local bucket, size = KEYS[2], mine and '0' or ARGV[6]
  local block = tonumber(size)
  -- include reserve.lua
  if type(c) == 'table' then
    return c
  end
  if ARGV[7] and c < tonumber(ARGV[7]) then
    c = tonumber(ARGV[7])
    redis.call('SET', bucket, string.format('%.0f', c))
  end
  keep(math.max(mine or 0, now + ARGV[5]))
  if ARGV[8] and redis.pcall('ZREM', waiting, ARGV[8]) == 1 and KEYS[5] then
    redis.pcall('HDEL', KEYS[5], ARGV[8])
  end
  return mine and -c or c
end

local function acquire()
  -- include acquire.lua
end
-- A reader that may not join keeps no want but its own: a writer that waits keeps its own, and one that is gone ends.
local lives = held == shared and not changed and redis.pcall('PTTL', waiting)
local answer = acquire()
if type(lives) == 'number' and lives >= 0 then
  redis.pcall('PEXPIRE', waiting, math.max(1, lives))
end
local counter = answer
if type(answer) == 'table' then
  counter = answer[1]
end
if type(counter) == 'number' then -- the key is the owner's
  open()
end
return answer
