-- reserve: a part of acquire and release, which replaces "-- include reserve.lua". It reserves
-- block fencing tokens (size is the same number as a text) in bucket, and sets c to the counter; or to an
-- error, if nothing was reserved.
--
-- A bucket that is missing (first use, flush, empty restart) starts at the node's own clock in
-- microseconds, so that tokens continue rising although the count was lost. One that is there, but
-- of a time before the node's epoch began (a restart with old data), continues above the
-- microsecond in which that was, ARGV[2].

local c = redis.pcall('INCRBY', bucket, size)
if type(c) ~= 'table' then -- else the bucket is no counter
  if c <= block then
    local t = redis.pcall('TIME')
    if t.err then -- not allowed: a bucket that began at 0 would be taken for one that was never lost
      redis.call('DEL', bucket)
      c = t
    else
      c = t[1] * 1000000 + t[2] + block
      redis.call('SET', bucket, string.format('%.0f', c))
    end
  end
  if type(c) ~= 'table' and c < ARGV[2] + block then
    c = ARGV[2] + block
    redis.call('SET', bucket, string.format('%.0f', c))
  end
end
