-- The list of conversations: two sorted sets by the moment of creation, one of all and one of an owner's, and
-- a clock that never shows the same moment twice.

local CLOCK, ALL, OWNED = 1, 2, 3

-- Puts a conversation at the head of both lists, before it begins; the moment in microseconds.
verbs.enroll = function(keys, _, args)
  local order = math.max(now_us(), tonumber(call('GET', keys[CLOCK]) or 0) + 1)
  call('SET', keys[CLOCK], whole(order))
  call('ZADD', keys[ALL], whole(order), args[1])
  call('ZADD', keys[OWNED], whole(order), args[1])
  return whole(order)
end

-- Moves a conversation in both lists from one moment to another, unless it stands elsewhere by now; "" is
-- nowhere.
verbs.settle = function(keys, _, args)
  local member, from, to = unpack(args)
  local order = call('ZSCORE', keys[ALL], member)
  if (order and whole(order) or '') ~= from then
    return
  end
  for n = ALL, OWNED do
    if to == '' then
      call('ZREM', keys[n], member)
    else
      call('ZADD', keys[n], to, member)
    end
  end
end

-- The moment that it is now, and conversations that were created before another, the newest first, each
-- followed by its moment. Given no moment, any.
verbs.page = function(keys, _, args)
  local before, many = unpack(args)
  local page = before == '' and call('ZRANDMEMBER', keys[1], many, 'WITHSCORES')
    or call('ZREVRANGEBYSCORE', keys[1], '(' .. before, '-inf', 'WITHSCORES', 'LIMIT', 0, many)
  table.insert(page, 1, whole(now_us()))
  return page
end

-- What a client asks for: the arguments of a verb, the verb, and whether it asks again.
local function run(keys, args)
  local again = table.remove(args) == '1'
  return verbs[table.remove(args)](keys, again, args)
end
