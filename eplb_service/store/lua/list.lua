#!lua flags=no-writes
-- Documents of a directory in the order of their numbers. KEYS: values, versions, directory.
-- ARGV: limit, "newest" or "oldest" first. Answers name, value, version for each.
local last = tonumber(ARGV[1]) - 1
local names
if ARGV[2] == 'newest' then
  names = redis.call('ZRANGE', KEYS[3], 0, last, 'REV')
else
  names = redis.call('ZRANGE', KEYS[3], 0, last)
end
local found = {}
for i, name in ipairs(names) do
  found[3 * i - 2] = name
  found[3 * i - 1] = redis.call('HGET', KEYS[1], name)
  found[3 * i] = redis.call('HGET', KEYS[2], name)
end
return found
