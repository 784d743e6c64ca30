-- confirm: a part of refresh and rrefresh, which replaces "-- include confirm.lua". It confirms and reserves the fencing
-- tokens of a lease whose key is the owner's, and ends the script with a reply: see refresh.lua. last is set before it:
-- '1', or for a read lease more: the readers that wait, or are gone, are no rivals then, and hide no writer.

local bucket, top, more = KEYS[2], ARGV[3], ARGV[4]
-- include raise.lua
if not ARGV[5] then
  return c
end
for _, name in ipairs(redis.pcall('ZRANGE', KEYS[3], '0', last)) do
  if name ~= ARGV[5] and (last == '1' or string.byte(name, -1) ~= 83) then
    return {c, name}
  end
end
return {c, ''}
