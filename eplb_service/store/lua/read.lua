#!lua flags=no-writes
-- Values and versions of names as of one moment. KEYS: values, versions. ARGV: names.
-- Answers value, version (both nil when absent) for each name.
local found = {}
for i, name in ipairs(ARGV) do
  found[2 * i - 1] = redis.call('HGET', KEYS[1], name)
  found[2 * i] = redis.call('HGET', KEYS[2], name)
end
return found
