-- rrefresh: restores the full ttl of a share of the key, and confirms the fencing tokens of its lease, as refresh.lua
-- does of a key. A key that is the owner's alone is shared from now on.
--
-- KEYS and ARGV as in refresh.lua, with two more keys: see readers.lua
--
-- Reply as refresh.lua; 0 also if the key is shared, and the owner has no share

local owner = ARGV[1]
-- include readers.lua
-- include share.lua
if mine then
  keep(math.max(mine, now + ARGV[2]))
elseif held == shared then
  return 0
else
  -- include ours.lua
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  open()
end
local last = '99'
-- include confirm.lua
