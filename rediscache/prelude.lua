-- What the scripts have in common. Their callers pass 16 random hexadecimal digits as ARGV[1].
--
-- An entry begins with 'fl1:', a letter for its kind, and its stamp, 32 characters: see entry.go.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2] -- microseconds: exact in a double until 2255

local function newStamp()
  return string.format('%016.0f', now) .. ARGV[1]
end

-- The stamp of what is stored at a key, '' if that is no entry.
local function stampOf(entry)
  if entry and #entry >= 37 and string.sub(entry, 1, 4) == 'fl1:' then
    return string.sub(entry, 6, 37)
  end
  return ''
end
