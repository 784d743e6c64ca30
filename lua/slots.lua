-- slots: reads keys of several hash slots, as acquire and release do with their own and the marker (see epoch.lua). A
-- server that is one of several refuses that.
--
-- KEYS  keys of flightlock's own, of which the last one is the marker
--
-- Reply: '', or the error of the first that cannot be read

for i = 1, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  if type(value) == 'table' then
    return value
  end
end
return ''
