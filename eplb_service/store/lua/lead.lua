#!lua
-- Take the lead of a deployment. KEYS: fence, replies, reply order.
-- ARGV: write id, fingerprint, owner, lease ms, floor, replies kept, highest epoch.
-- Answers "led EPOCH", "held EPOCH LEFT_MS OWNER", "exhausted EPOCH" or "reused".
-- Time is the server's, so that planners on machines whose clocks differ agree about a lease.
local fence, replies, reply_order = KEYS[1], KEYS[2], KEYS[3]
local write_id, fingerprint, owner = ARGV[1], ARGV[2], ARGV[3]
local lease_ms = tonumber(ARGV[4])

local known = redis.call('HMGET', replies, write_id .. ' fingerprint', write_id .. ' answer')
if known[1] then
  if known[1] ~= fingerprint then
    return 'reused'
  end
  return known[2]
end

local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local held = redis.call('HMGET', fence, 'epoch', 'owner', 'expires_ms', 'lease_ms')
local epoch = tonumber(held[1] or '0')
local holder = held[2] or ''
if holder ~= '' and holder ~= owner then
  local left_ms = tonumber(held[3]) - now_ms
  if left_ms > tonumber(held[4]) then
    -- The server's clock was set back: a lease never outlives its own length from now.
    left_ms = tonumber(held[4])
    redis.call('HSET', fence, 'expires_ms', string.format('%.0f', now_ms + left_ms))
  end
  if left_ms > 0 then
    return string.format('held %d %.0f %s', epoch, left_ms, holder)
  end
end

epoch = 1 + math.max(epoch, tonumber(ARGV[5]))
if epoch > tonumber(ARGV[7]) then
  return string.format('exhausted %.0f', epoch)
end
redis.call('HSET', fence, 'epoch', string.format('%d', epoch), 'owner', owner,
  'expires_ms', string.format('%.0f', now_ms + lease_ms), 'lease_ms', string.format('%.0f', lease_ms))

local answer = string.format('led %d', epoch)
redis.call('HSET', replies, write_id .. ' fingerprint', fingerprint, write_id .. ' answer', answer)
if redis.call('RPUSH', reply_order, write_id) > tonumber(ARGV[6]) then
  local oldest = redis.call('LPOP', reply_order)
  redis.call('HDEL', replies, oldest .. ' fingerprint', oldest .. ' answer')
end
return answer
