-- Marks an entry, so that the next lookup before a load takes it for stale. Whoever began to load before may still
-- store, and leaves the mark (see store.lua): a mark is the last third of the random digits of the stamp.
--
-- KEYS[1]  the entry
-- ARGV[1]  random digits

local entry = redis.call('GETRANGE', KEYS[1], 0, 36)
local stamp = stampOf(entry)
if stamp ~= '' then
  local kind = string.sub(entry, 5, 5)
  if kind ~= 'v' and kind ~= 'r' then
    kind = 't'
  else
    kind = 'r'
  end
  redis.call('SETRANGE', KEYS[1], 4, kind .. string.sub(stamp, 1, 24) .. string.sub(ARGV[1], 9))
end
return 1
