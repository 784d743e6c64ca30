-- Replaces whatever is there by a tombstone with a new stamp, or deletes it if SET is refused, as by a
-- server that is full: an entry that is missing has no stamp either.
--
-- KEYS[1]  the entry
-- ARGV[1]  random digits
-- ARGV[2]  how long the tombstone stays, in milliseconds. When it is gone, no load can be stored
--          until another one was made, so this only saves loads.

local made = redis.pcall('SET', KEYS[1], 'fl1:t' .. newStamp(), 'PX', ARGV[2])
if made.err then
  redis.call('DEL', KEYS[1])
end
return 1
