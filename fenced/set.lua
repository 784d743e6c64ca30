-- set: writes a value unless somebody with a larger token has written before, or has read in
-- order to write.
--
-- KEYS[1]  the value
-- KEYS[2]  its token
-- ARGV[1]  token of the writer, decimal
-- ARGV[2]  set, del or get
-- ARGV[3]  ttl of the value in ms; 0: none
-- ARGV[4]  how much longer than the value the token stays, in ms
-- ARGV[5]  the value, for set
--
-- Reply
--   0        written
--   {value}  read; {nil} if there is none
--   token    the larger one; nothing was written or read

local mine, known = ARGV[1], redis.call('GET', KEYS[2])
-- As text: a Lua number is exact to 2^53 only.
if known and (#known > #mine or (#known == #mine and known > mine)) then
  return known
end
local op, ttl, keep = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local reply, forever = 0, op == 'set' and ttl == 0
if op == 'get' then
  reply = {redis.call('GET', KEYS[1])}
  ttl = redis.call('PTTL', KEYS[1])
  forever = ttl == -1
  ttl = math.max(ttl, 0)
end
-- The token first: if the server refuses the rest, nothing stands that an older writer may change.
-- It never gets a shorter life than it has: an older writer may still be on its way.
local left = redis.call('PTTL', KEYS[2])
if forever or left == -1 then
  redis.call('SET', KEYS[2], mine)
else
  redis.call('SET', KEYS[2], mine, 'PX', math.max(left, ttl + keep))
end
if op == 'del' then
  redis.call('DEL', KEYS[1])
elseif op == 'set' and ttl == 0 then
  redis.call('SET', KEYS[1], ARGV[5])
elseif op == 'set' then
  redis.call('SET', KEYS[1], ARGV[5], 'PX', ttl)
end
return reply
