-- undeclared: reads a key that it does not declare, in another hash slot than the one that it declares, as
-- acquire and release do with the marker (see epoch.lua). Some servers refuse that.
--
-- KEYS[1]  a key of flightlock's own, which is not accessed
--
-- Reply: the error; '' if there is none

local marker = redis.pcall('GET', 'flightlock:{boot}')
return type(marker) == 'table' and marker.err or ''
