#!lua
-- Apply a write whole or not at all.
-- KEYS: fence, values, versions, replies, reply order, journal, then one sorted set for each directory touched.
-- ARGV: write id, fingerprint, epoch, replies kept, journal kept, then four lists, each led by its length:
--   expects (name, version), puts (name, value, position of its directory in KEYS or 0, number),
--   deletes (name, position of its directory in KEYS or 0), journal entries.
-- Answers "written VERSION…" in the order of the puts, "conflict NAME VERSION…" (the versions found),
-- "fenced EPOCH OWNER" (no owner: resigned) or "reused". Names hold no blanks.
local fence, values, versions = KEYS[1], KEYS[2], KEYS[3]
local replies, reply_order, journal = KEYS[4], KEYS[5], KEYS[6]
local write_id, fingerprint = ARGV[1], ARGV[2]

local known = redis.call('HMGET', replies, write_id .. ' fingerprint', write_id .. ' answer')
if known[1] then
  if known[1] ~= fingerprint then
    return 'reused'
  end
  return known[2]
end

local held = redis.call('HMGET', fence, 'epoch', 'owner', 'deleted_version')
local owner = held[2] or ''
if held[1] ~= ARGV[3] or owner == '' then
  return 'fenced ' .. (held[1] or '0') .. ' ' .. owner
end

local position = 6
local function next_argument()
  position = position + 1
  return ARGV[position - 1]
end
local function version_of(name)
  return tonumber(redis.call('HGET', versions, name) or '0')
end
local function remember(answer)
  redis.call('HSET', replies, write_id .. ' fingerprint', fingerprint, write_id .. ' answer', answer)
  if redis.call('RPUSH', reply_order, write_id) > tonumber(ARGV[4]) then
    local oldest = redis.call('LPOP', reply_order)
    redis.call('HDEL', replies, oldest .. ' fingerprint', oldest .. ' answer')
  end
  return answer
end

local wrong = {'conflict'}
for _ = 1, tonumber(next_argument()) do
  local name, expected = next_argument(), tonumber(next_argument())
  local found = version_of(name)
  if found ~= expected then
    wrong[#wrong + 1] = name
    wrong[#wrong + 1] = string.format('%.0f', found)
  end
end
if #wrong > 1 then
  return remember(table.concat(wrong, ' '))
end

local puts = {}
for i = 1, tonumber(next_argument()) do
  puts[i] = {next_argument(), next_argument(), tonumber(next_argument()), next_argument()}
end

-- Deleted first, so that what this same write creates already starts above it.
local deleted_version = tonumber(held[3] or '0')
local num_deletes = tonumber(next_argument())
for _ = 1, num_deletes do
  local name, directory = next_argument(), tonumber(next_argument())
  deleted_version = math.max(deleted_version, version_of(name))
  redis.call('HDEL', values, name)
  redis.call('HDEL', versions, name)
  if directory > 0 then
    redis.call('ZREM', KEYS[directory], name)
  end
end
if num_deletes > 0 then
  redis.call('HSET', fence, 'deleted_version', string.format('%.0f', deleted_version))
end

local answer = {'written'}
for _, put in ipairs(puts) do
  local version = version_of(put[1])
  if version == 0 then
    version = deleted_version
  end
  version = string.format('%.0f', version + 1)
  redis.call('HSET', values, put[1], put[2])
  redis.call('HSET', versions, put[1], version)
  if put[3] > 0 then
    redis.call('ZADD', KEYS[put[3]], put[4], put[1])
  end
  answer[#answer + 1] = version
end

local num_entries = tonumber(next_argument())
for _ = 1, num_entries do
  redis.call('RPUSH', journal, next_argument())
end
if num_entries > 0 then
  redis.call('LTRIM', journal, -tonumber(ARGV[5]), -1)
end
return remember(table.concat(answer, ' '))
