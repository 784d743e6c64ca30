-- Removes keys from a tag, after their entries were invalidated, except those that were added again meanwhile.
--
-- KEYS[1]  the tag: see tag.lua
-- ARGV[1]  random digits
-- ARGV[2]  a key
-- ARGV[3]  the score that it had before its entry was invalidated, and so on for more keys

for i = 2, #ARGV, 2 do
  if tonumber(redis.call('ZSCORE', KEYS[1], ARGV[i]) or 0) == tonumber(ARGV[i + 1]) then
    redis.call('ZREM', KEYS[1], ARGV[i])
  end
end
return 1
