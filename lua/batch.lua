-- batch: operations on any number of keys, one after the other, each as its own script
-- would do it. What one EVALSHA costs by itself is paid once for all of them.
--
-- The scripts stand above, put there by lua.go: operations[letter] is the letter's script
-- as a function, which reads its KEYS and ARGV from keysOf[letter] and valuesOf[letter].
--
-- KEYS     the keys of all operations, in order
-- ARGV[1]  three characters for each operation: its letter, how many keys it has, and how
--          many values. No values (0) means that only the first follows, and the others
--          are those of the last operation with that letter
-- ARGV[2]  and so on: the values of all operations, in order
--
-- Reply
--   a list       the reply of each operation, in order. If an operation fails, a list of one
--                is in its place, the error's text (go-redis loses its place in a reply with
--                some errors in it), and the others are done all the same
--   error        what the server says before it runs a script; nothing was done
--
-- One thing is not as in a script by itself. A server that is out of memory refuses commands
-- that need some until the script has written anything. So an acquire that comes after
-- another operation's write is not refused; it is granted, and wholly.

local keys, values, shapes = KEYS, ARGV, ARGV[1]
local byte, pcall = string.byte, pcall
local replies = {}
local k, v = 1, 2
for i = 1, #shapes, 3 do
  local letter, nk, nv = byte(shapes, i, i + 2)
  nk, nv = nk - 48, nv - 48
  local own = keysOf[letter]
  own[1], own[2], own[3] = keys[k], nk > 1 and keys[k + 1] or nil, nk > 2 and keys[k + 2] or nil
  own = valuesOf[letter]
  own[1] = values[v]
  if nv == 0 then
    nv = 1
  else
    for j = 2, 5 do
      own[j] = j <= nv and values[v + j - 1] or nil
    end
  end
  k, v = k + nk, v + nv

  local ok, reply = pcall(operations[letter])
  if not ok then -- say it as the server does when a script ends by an error
    reply = type(reply) == 'table' and reply.err or tostring(reply)
    if string.find(reply, '^%u+ ') then
      reply = {reply .. ' script: batch, on @user_script.'}
    else
      reply = {'ERR Error running script (call to batch): @user_script: ' .. reply}
    end
  elseif type(reply) == 'table' and reply.err then
    reply = {reply.err}
  end
  replies[#replies + 1] = reply
end
return replies
