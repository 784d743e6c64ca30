-- slots: reads a key that is in another hash slot than the first, as acquire and release do with the marker (see
-- epoch.lua). A server that is one of several refuses that.
--
-- KEYS[1]  a key of flightlock's own, which is not accessed
-- KEYS[2]  the marker
--
-- Reply: the error; '' if there is none

local marker = redis.pcall('GET', KEYS[2])
return type(marker) == 'table' and marker.err or ''
