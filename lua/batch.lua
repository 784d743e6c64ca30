-- batch: operations on any number of keys, one after the other, each as its own script
-- would do it. The cost of an EVALSHA by itself is paid once for all of them.
--
-- lua.go puts the scripts before this text: operations[letter] is the letter's script
-- as a function, which reads its KEYS and ARGV from keysOf[letter] and valuesOf[letter].
--
-- KEYS     the keys of all operations, in order
-- ARGV[1]  three characters for each operation: its letter, how many keys it has, and how
--          many values. No values (0) means that only the first follows, and the others
--          are those of the last operation with that letter.
--          The letter g stands for a group of n releases that name no rival, n being the second
--          character. Their keys are n lock keys and then the n names of their wants;
--          their values, n owners and then ARGV[2] and ARGV[3] of release, which no later
--          operation can leave out
-- ARGV[2]  and so on: the values of all operations, in order
--
-- Reply
--   a list       the reply of each operation, in order. If an operation fails, a list of one
--                is in its place, the error's text (go-redis loses its place in a reply with
--                some errors in it), and the other operations are executed nevertheless
--   error        what the server says before it runs a script; nothing was done
--
-- In one respect a batch differs from single scripts. A server that is out of memory refuses
-- commands that need memory until the script has written something. So an acquire that follows
-- another operation's write is not refused; it is granted, completely.

local keys, values, shapes = KEYS, ARGV, ARGV[1]
local byte, pcall = string.byte, pcall
local replies, n = {}, 0
local k, v = 1, 2

-- run is the reply of an operation whose keys and values are in their place.
local function run(letter)
  local ok, reply = pcall(operations[letter])
  if not ok then -- say it as the server does when a script ends by an error
    reply = type(reply) == 'table' and reply.err or tostring(reply)
    if string.find(reply, '^%u+ ') then
      return {reply .. ' script: batch, on @user_script.'}
    end
    return {'ERR Error running script (call to batch): @user_script: ' .. reply}
  elseif type(reply) == 'table' and reply.err then
    return {reply.err}
  end
  return reply
end

-- settled is the group's releases that leave nothing to decide, as a set of their numbers:
-- the key is the owner's, and nobody wants it. Nearly all are like that. Three commands do
-- for all of them what would be three for each.
local function settled(size)
  local gone, list = {}, {}
  local holders = redis.pcall('MGET', unpack(keys, k, k + size - 1))
  local wanted = redis.pcall('EXISTS', unpack(keys, k + size, k + 2 * size - 1)) ~= 0
  for i = 1, size do
    if holders[i] == values[v + i - 1] and not (wanted and redis.pcall('EXISTS', keys[k + size + i - 1]) ~= 0) then
      gone[i] = true
      list[#list + 1] = keys[k + i - 1]
    end
  end
  if list[1] and type(redis.pcall('DEL', unpack(list))) == 'table' then
    return {} -- to have each say why
  end
  return gone
end

local function group(size)
  local gone, letter = settled(size), byte('r')
  local own, theirs = keysOf[letter], valuesOf[letter]
  for i = 1, size do
    n = n + 1
    if gone[i] then
      replies[n] = 1
    else
      own[1], own[2], own[3] = keys[k + i - 1], keys[k + size + i - 1], nil
      theirs[1], theirs[2], theirs[3] = values[v + i - 1], values[v + size], values[v + size + 1]
      for j = 4, 8 do
        theirs[j] = nil
      end
      replies[n] = run(letter)
    end
  end
  k, v = k + 2 * size, v + size + 2
end

local function single(letter, nk, nv)
  local own = keysOf[letter]
  own[1], own[2], own[3] = keys[k], nk > 1 and keys[k + 1] or nil, nk > 2 and keys[k + 2] or nil
  own = valuesOf[letter]
  own[1] = values[v]
  if nv == 0 then
    nv = 1
  else
    for j = 2, 8 do
      own[j] = j <= nv and values[v + j - 1] or nil
    end
  end
  k, v = k + nk, v + nv
  n = n + 1
  replies[n] = run(letter)
end

for i = 1, #shapes, 3 do
  local letter, nk, nv = byte(shapes, i, i + 2)
  if letter == 103 then -- g
    group(nk - 48)
  else
    single(letter, nk - 48, nv - 48)
  end
end
return replies
