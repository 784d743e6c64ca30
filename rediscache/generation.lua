-- The generation of the tags of a Cache: it rises with every InvalidateTag. A load notes the one in which it begins, and
-- a tag the one in which it was invalidated last, so that a load from before cannot be stored with that tag.
--
-- KEYS[1]  the generation
-- ARGV[1]  random digits
-- ARGV[2]  1 to begin another one, or 0
--
-- Returns it. One that is lost begins at the server's time in microseconds, which is above all that were.

local generation = tonumber(redis.call('GET', KEYS[1]) or 0)
if generation == 0 or ARGV[2] == '1' then
  generation = math.max(generation + 1, now)
  redis.call('SET', KEYS[1], string.format('%.0f', generation))
end
return string.format('%.0f', generation)
