-- One conversation: what is done with it in one go, so that nobody sees half of it.
--
-- Every verb gets the same keys, all in one slot:
--   head       a hash: next, digest (of the last entry), order (when it was created), owner, name, parent,
--              fork_at, used and ttl (when it was last used, and for how long it is kept after that); and
--              c:<name> a cursor, f:<key and order> a fork, l:<name> a lease, v:<view> a snapshot, n:<name>
--              another value of its shelf
--   log        a stream: the entry at place n has the id (n + 1)-0
--   ids        a hash: from an entry's id to its place
--   unsaid     a sorted set: the places of entries of other kinds than "said"
--   summaries, kept  of older versions, which are only erased and expire
-- and `again`, whether it may have been done already by a try whose answer was lost.

local HEAD, LOG, IDS, UNSAID, SUMMARIES, KEPT = 1, 2, 3, 4, 5, 6
local GENESIS = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'
local PAGE = 25 -- entries that are looked at in one go
local MOST = 1000 -- entries in an answer that could be given in several
local MOST_BYTES = 8000000 -- the same in bytes
local ENROLLED_US = 600000000 -- so long after it was enrolled, a conversation may still begin
local LAZY_MS = 3600000 -- so often a conversation that never expires is seen to be listed

local verbs = {}

local function call(...)
  return redis.call(...)
end

local function whole(number)
  return string.format('%.0f', number)
end

local function now_us()
  local time = call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function is_late(order)
  return order == '' or now_us() - tonumber(order) > ENROLLED_US
end

local function exists(keys)
  return call('HEXISTS', keys[HEAD], 'next') == 1
end

-- Puts off when a conversation expires: all its keys at the same moment, those in `new` if no others. True
-- about once in a hundredth of that time: then it is time to see whether it is still listed.
local function touch(keys, ttl, new, seen)
  seen = seen or call('HMGET', keys[HEAD], 'used', 'ttl')
  local now, used = math.floor(now_us() / 1000), tonumber(seen[1] or 0)
  local due = seen[2] ~= ttl or now - used >= (ttl == '0' and LAZY_MS or ttl / 100)
  if due then
    used, new = now, { HEAD, LOG, IDS, UNSAID, SUMMARIES, KEPT }
    call('HSET', keys[HEAD], 'used', whole(now), 'ttl', ttl)
  end
  for _, n in pairs(new) do
    if ttl == '0' then
      call('PERSIST', keys[n])
    elseif due or call('PTTL', keys[n]) == -1 then
      call('PEXPIREAT', keys[n], whole(used + ttl))
    end
  end
  return due
end

local function use(keys, ttl)
  return exists(keys) and touch(keys, ttl, {}) and call('HGET', keys[HEAD], 'order') or ''
end

-- Appending and reading

local function entry(keys, place)
  local row = call('XRANGE', keys[LOG], whole(place + 1), whole(place + 1))[1]
  return row and row[2][2]
end

-- Fence, until, holder.
local function parsed(lease)
  return string.match(lease, '^(%S+) (%S+) (.*)$')
end

local function is_held(current, fence, holder)
  local known, ends, by = parsed(current)
  return known == fence and by == holder and tonumber(ends) ~= 0
end

-- Next place, last digest, order, and the lease that is asked for.
local function tip(keys, lease)
  local head = call('HMGET', keys[HEAD], 'next', 'digest', 'order', 'used', 'ttl', lease)
  return { head[1] or '0', head[2] or GENESIS, head[3] or '', head[6] or '' }, head
end

verbs.tip = function(keys, _, args)
  local state = tip(keys, args[1])
  return { state[1], state[2], state[4] }
end

-- "stored", its order, and that again if it is time to see that it is listed; "late", where it has to be enrolled
-- anew; "torn", where its keys do not belong together; or "conflict", its order, "" and the tip.
verbs.append = function(keys, again, args)
  local ttl, first, after, digest, order, owner, name, lease, fence, holder = unpack(args, 1, 10)
  local start = 11 -- then each entry: s or u for said or not, with = and its id if it has one; all of it
  local state, head = tip(keys, lease)
  local next, last = tonumber(first), tonumber(first) + (#args - start + 1) / 2
  if again and tonumber(state[1]) >= last then
    local there = entry(keys, last - 1)
    if there and string.sub(there, -16) == digest then
      call('HINCRBY', keys[HEAD], 'next', 0) -- a write, for whoever waits until it is on disk
      return { 'stored', state[3], '' }
    end
  end
  if state[1] ~= first or state[2] ~= after or (lease ~= '' and not is_held(state[4], fence, holder)) then
    return { 'conflict', state[3], '', state[1], state[2], state[4] }
  elseif not head[1] and is_late(order) then
    return { 'late', '', '' }
  elseif call('XLEN', keys[LOG]) ~= next then
    return { 'torn', '', '' }
  end
  local new = next == 0 and { LOG, IDS, UNSAID } or {}
  for n = start, #args, 2 do
    local mark, place = args[n], whole(next)
    next = next + 1
    call('XADD', keys[LOG], whole(next) .. '-0', 'e', args[n + 1])
    if string.sub(mark, 1, 1) == 'u' then
      call('ZADD', keys[UNSAID], place, place)
      new[1] = new[1] or UNSAID
    end
    if #mark > 1 then
      call('HSET', keys[IDS], string.sub(mark, 3), place)
      new[2] = new[2] or IDS
    end
  end
  call('HSET', keys[HEAD], 'next', whole(last), 'digest', digest)
  if not head[1] then
    call('HSET', keys[HEAD], 'order', order, 'owner', owner, 'name', name)
    state[3] = order
  end
  local due = touch(keys, ttl, new, { head[4], head[5] }) and head[1]
  return { 'stored', state[3], due and state[3] or '' }
end

-- Adds entries to `answer` until it is large; the place to go on at, or "" where there are no more.
local function collect(keys, answer, start, stop)
  local bytes = 0
  while true do
    local last = stop == '' and '+' or stop
    local rows = call('XRANGE', keys[LOG], whole(start + 1), last, 'COUNT', PAGE)
    for _, row in ipairs(rows) do
      table.insert(answer, row[2][2])
      start, bytes = start + 1, bytes + #row[2][2]
      if #answer >= MOST or bytes >= MOST_BYTES then
        return whole(start)
      end
    end
    if #rows < PAGE then
      return ''
    end
  end
end

local function collect_unsaid(keys, answer, start, stop)
  local last = stop == '' and '+inf' or '(' .. stop
  local places, bytes = call('ZRANGEBYSCORE', keys[UNSAID], start, last, 'LIMIT', 0, MOST), 0
  for n, place in ipairs(places) do
    local row = entry(keys, place) or ''
    table.insert(answer, row)
    bytes = bytes + #row
    if n == MOST or bytes >= MOST_BYTES then
      return whole(place + 1)
    end
  end
  return ''
end

-- Its order if it is time to see that it is listed, where to go on, and entries from there on.
verbs.read = function(keys, _, args)
  local ttl, start, stop, but = unpack(args)
  local answer = { use(keys, ttl), '' }
  answer[2] = (but == 'said' and collect_unsaid or collect)(keys, answer, tonumber(start), stop)
  return answer
end

-- The same from the entry before the newest snapshot of a view on, and in front of it that snapshot.
verbs.resume = function(keys, _, args)
  local ttl, view = unpack(args)
  local snapshot = call('HGET', keys[HEAD], 'v:' .. view) or ''
  local answer = { snapshot, use(keys, ttl), '' }
  local start = math.max(0, tonumber(string.match(snapshot, '^%d+') or 0) - 1)
  answer[3] = collect(keys, answer, start, '')
  return answer
end

-- The first of the entries that are asked for, "" for each that is not there.
verbs.fetch = function(keys, _, args)
  local answer, bytes = { use(keys, args[1]) }, 0
  for n = 2, #args do
    local row = entry(keys, args[n]) or ''
    table.insert(answer, row)
    bytes = bytes + #row
    if bytes >= MOST_BYTES then
      break
    end
  end
  return answer
end

verbs.find = function(keys, _, args)
  local answer = {}
  for n, id in ipairs(args) do
    answer[n] = call('HGET', keys[IDS], id)
  end
  return answer
end

-- What its head says, and one more field of it.
verbs.row = function(keys, _, args)
  return call('HMGET', keys[HEAD], 'next', 'order', 'owner', 'name', 'parent', 'fork_at', args[1])
end

verbs.use = function(keys, _, args)
  return use(keys, args[1])
end

-- All fields of the head with a prefix, without it, each followed by what is in it.
verbs.fields = function(keys, _, args)
  local all, answer, size = call('HGETALL', keys[HEAD]), {}, #args[1]
  for n = 1, #all, 2 do
    if string.sub(all[n], 1, size) == args[1] then
      table.insert(answer, string.sub(all[n], size + 1))
      table.insert(answer, all[n + 1])
    end
  end
  return answer
end

-- The shelf

-- Whether it was put there.
verbs.put = function(keys, _, args)
  local ttl, field, value = unpack(args)
  if not exists(keys) then
    return 0
  end
  call('HSET', keys[HEAD], field, value)
  touch(keys, ttl, { HEAD })
  return 1
end

-- Whether the value was the old one; without a `ttl`, the shelf is of no conversation.
verbs.compare_and_set = function(keys, _, args)
  local ttl, must_exist, field, known, old, new = unpack(args)
  local value = call('HGET', keys[HEAD], field)
  if (must_exist == '1' and not exists(keys)) or (value and '1' or '0') ~= known or (value and value ~= old) then
    return 0
  end
  call('HSET', keys[HEAD], field, new)
  if ttl ~= '' then
    touch(keys, ttl, { HEAD })
  end
  return 1
end

-- Forking and erasing

-- Makes a conversation of what was drafted under six more keys in the same slot: its order; or "late", "torn".
verbs.publish = function(keys, _, args)
  local ttl, order, owner, name, next, digest, parent, fork_at = unpack(args)
  if exists(keys) then
    call('HINCRBY', keys[HEAD], 'next', 0) -- a write, should it be asked again
    return call('HGET', keys[HEAD], 'order')
  elseif is_late(order) then
    return 'late'
  elseif call('XLEN', keys[KEPT + LOG]) ~= tonumber(next) or call('EXISTS', keys[LOG]) == 1 then
    return 'torn'
  end
  for n = LOG, UNSAID do
    if call('EXISTS', keys[KEPT + n]) == 1 then
      call('RENAME', keys[KEPT + n], keys[n])
    end
  end
  call('DEL', keys[KEPT + HEAD])
  call('HDEL', keys[HEAD], 'used', 'ttl') -- so that all its keys get the same time
  call('HSET', keys[HEAD], 'next', next, 'digest', digest, 'order', order, 'owner', owner, 'name', name)
  call('HSET', keys[HEAD], 'parent', parent, 'fork_at', fork_at)
  touch(keys, ttl, {})
  return order
end

-- Puts down a fork in its parent, as long as it is the parent that was meant.
verbs.adopt = function(keys, _, args)
  local order, fork = unpack(args)
  if call('HGET', keys[HEAD], 'order') ~= order then
    return 0
  end
  call('HSET', keys[HEAD], fork, '')
  return 1
end

-- Gives a fork another parent, as long as it has the one that was meant.
verbs.reparent = function(keys, _, args)
  local from, to, fork_at = unpack(args)
  if call('HGET', keys[HEAD], 'parent') ~= from then
    return 0
  end
  if to == '' then
    call('HDEL', keys[HEAD], 'parent', 'fork_at')
  else
    call('HSET', keys[HEAD], 'parent', to, 'fork_at', fork_at)
  end
  return 1
end

-- The fields in which it had values that are found by their owner; nothing is erased of another record than the
-- one that was meant.
verbs.erase = function(keys, _, args)
  if (call('HGET', keys[HEAD], 'order') or '') ~= args[1] then
    return {}
  end
  local found = {}
  for _, field in ipairs(call('HKEYS', keys[HEAD])) do
    if string.sub(field, 1, 3) == 'n:~' then
      table.insert(found, field)
    end
  end
  for n = HEAD, KEPT do
    call('UNLINK', keys[n])
  end
  return found
end

-- Health

-- What is wrong with it, in words.
verbs.examine = function(keys)
  local head, problems = call('HMGET', keys[HEAD], 'next', 'digest'), {}
  if not head[1] then
    return problems
  end
  local next = tonumber(head[1])
  local last = next > 0 and entry(keys, next - 1) or GENESIS
  if call('XLEN', keys[LOG]) ~= next or string.sub(last or '', -16) ~= head[2] then
    table.insert(problems, 'its head and its log do not belong together')
  end
  local ends = call('PTTL', keys[HEAD])
  for n = LOG, KEPT do
    local ttl = call('PTTL', keys[n])
    if ttl ~= -2 and ttl ~= ends then
      table.insert(problems, 'its keys do not expire together')
      break
    end
  end
  return problems
end
