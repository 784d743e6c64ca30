-- readers: a part of the scripts of read leases, which replaces "-- include readers.lua". owner is set before it.
--
-- Readers share the lock key: its value is the reserved owner `shared`, and beside it is a sorted set of their owners,
-- each with the millisecond of the node's clock in which its share ends. The key lives until the last share ends.
-- Whoever wants the key for itself finds it held, as by anybody; and since the reserved owner ends with the mark of a
-- lease that may be retained, acquire.lua publishes a recall to the inbox "readers" of all clients.
--
-- A reader may also have the key for itself, as its owner: release.lua grants it that way to a reader that waits, and a
-- reader that is the last takes it back that way in order to release it. So what is passed on is passed on by the
-- scripts of all others.
--
-- KEYS[1]  the lock key
-- KEYS[2]  the readers of that key
-- KEYS[3]  the wants of that key (see release.lua)
-- The keys and arguments that follow are those of the script of the same verb, whose KEYS[2] is KEYS[4] here, and so on.
--
-- mine is when the owner's share ends, or nil if it has none, or that has ended; now is the millisecond by the node's
-- clock.

local readers, waiting = KEYS[2], KEYS[3]
table.remove(KEYS, 2)
table.remove(KEYS, 2)
local shared = 'flightlock:readers#readers-R'
local held = redis.pcall('GET', KEYS[1])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local mine = held == shared and tonumber(redis.call('ZSCORE', readers, owner) or nil)
if not mine or mine < now then
  mine = nil
end
