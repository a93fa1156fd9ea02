#!lua flags=allow-oom
-- Let the next leader in at once. Also without free memory. KEYS: fence. ARGV: epoch, owner. The epoch stays: it never goes back.
-- Answers "resigned", also when another leads by now.
local held = redis.call('HMGET', KEYS[1], 'epoch', 'owner')
if held[1] == ARGV[1] and held[2] == ARGV[2] then
  redis.call('HSET', KEYS[1], 'owner', '', 'expires_ms', '0')
end
return 'resigned'
