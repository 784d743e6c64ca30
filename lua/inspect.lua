-- inspect: reads what a node knows of a lock, and changes nothing.
--
-- KEYS[1]  the lock key
-- KEYS[2]  the fence bucket of that key
-- KEYS[3]  the wants of that key (see release.lua)
-- ARGV[1]  an owner whose client is told to end the lock, if the key is the owner's. May be left out, with
-- ARGV[2]  the inbox of that client, and
-- ARGV[3]  a recall (see acquire.lua) whose contender is "!"
--
-- Reply
--   {holder, pttl, counter, contender, ...}  holder: '' if there is none; pttl in milliseconds, below 0 when unknown;
--                                            counter: '0' if there is none; those that wait, in order, a thousand at most
--   error                                    the key is no string, or may not be read

local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  return holder
end
if ARGV[1] and holder == ARGV[1] then
  redis.pcall('PUBLISH', ARGV[2], ARGV[3])
end
local counter, wants = redis.pcall('GET', KEYS[2]), redis.pcall('ZRANGE', KEYS[3], '0', '999')
local seen = {holder or '', redis.call('PTTL', KEYS[1]), type(counter) == 'string' and counter or '0'}
for i = 1, #wants do
  seen[i + 3] = wants[i]
end
return seen
