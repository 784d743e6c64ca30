-- rdone: done.lua of a read lease: its owner leaves those who share the key; the last of them has the key released as
-- any other.
--
-- KEYS and ARGV as in done.lua, with two more keys: see readers.lua
--
-- Reply as done.lua; 1 also if others share the key on

local owner = ARGV[1]
-- include readers.lua
-- include leave.lua
-- include done.lua
