-- Replaces whatever is there by a tombstone with a new stamp.
--
-- KEYS[1]  the entry
-- ARGV[1]  random digits
-- ARGV[2]  how long the tombstone stays, in milliseconds. When it is gone, no load can be stored
--          until another one was made, so this only saves loads.

redis.call('SET', KEYS[1], 'fl1:t' .. newStamp(), 'PX', ARGV[2])
return 1
