-- sets: publishes on a node the set of nodes that a client locks on, and returns the sets that
-- were published there lately. Two sets with majorities that share no node are two locks on one
-- key.
--
-- KEYS[1]  flightlock:{sets}
-- ARGV[1]  the set's name: letters and digits
-- ARGV[2]  its description, without a newline
-- ARGV[3]  how long the description is kept, in milliseconds
--
-- Reply: the new value of the key: for each set a line "due name text", the due time by
-- the node's clock in milliseconds. At most 16 sets are kept; the caller's is the first.

local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local last = now + tonumber(ARGV[3])
local lines = {string.format('%.0f %s %s', last, ARGV[1], ARGV[2])}
for due, name, text in string.gmatch(redis.call('GET', KEYS[1]) or '', '(%d+) (%w+) ([^\n]*)\n') do
  if name ~= ARGV[1] and tonumber(due) > now and #lines < 16 then
    lines[#lines + 1] = due .. ' ' .. name .. ' ' .. text
    last = math.max(last, tonumber(due))
  end
end
local value = table.concat(lines, '\n') .. '\n'
redis.call('SET', KEYS[1], value, 'PX', string.format('%.0f', last - now))
return value
