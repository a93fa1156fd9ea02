#!lua flags=allow-oom
-- Extend a lease from now. Also without free memory: it overwrites a few bytes. KEYS: fence. ARGV: epoch, owner, lease ms.
-- Answers "renewed" or "fenced EPOCH OWNER" (no owner: resigned).
local held = redis.call('HMGET', KEYS[1], 'epoch', 'owner')
local epoch, owner = held[1] or '0', held[2] or ''
if epoch ~= ARGV[1] or owner ~= ARGV[2] then
  return 'fenced ' .. epoch .. ' ' .. owner
end
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('HSET', KEYS[1], 'expires_ms', string.format('%.0f', now_ms + tonumber(ARGV[3])), 'lease_ms', ARGV[3])
return 'renewed'
