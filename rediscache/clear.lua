-- Deletes an entry, and nothing else. Loads that are under way have no stamp any more.
--
-- KEYS[1]  the entry
-- ARGV[1]  random digits

if redis.pcall('GETRANGE', KEYS[1], 0, 3) == 'fl1:' then
  redis.call('DEL', KEYS[1])
end
return 1
