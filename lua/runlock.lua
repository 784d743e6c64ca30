-- runlock: release.lua of a read lease: its owner leaves those who share the key; the last of them has the key released as
-- any other.
--
-- KEYS and ARGV as in release.lua, with two more keys: see readers.lua
--
-- Reply as release.lua; 1 also if others share the key on

local owner = ARGV[4]
-- include readers.lua
-- include leave.lua
-- include release.lua
