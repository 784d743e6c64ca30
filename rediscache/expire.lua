-- Makes a value stale, with a new stamp of the same age: loads that are under way cannot be stored. Where there is no
-- value, only the stamp changes. If SETRANGE is refused, as by a server that is full, the entry is deleted.
--
-- KEYS[1]  the entry
-- ARGV[1]  random digits
-- ARGV[2]  how long the value may be served from now on, in microseconds

local entry = redis.call('GETRANGE', KEYS[1], 0, 68)
local stamp = stampOf(entry)
if stamp == '' then
  return 1
end
local kind, made = string.sub(entry, 5, 5), nil
if #entry == 69 and (kind == 'v' or kind == 'r') then
  local expires = math.min(tonumber(string.sub(entry, 54)), now + ARGV[2])
  made = redis.pcall('SETRANGE', KEYS[1], 4,
    string.format('v%s%s%016d%016.0f', string.sub(stamp, 1, 16), ARGV[1], 0, expires))
else
  made = redis.pcall('SETRANGE', KEYS[1], 4, 't' .. newStamp())
end
if type(made) == 'table' then
  redis.call('DEL', KEYS[1])
end
return 1
