-- Rejects requests without a key of `KEYS`, which is set above: a list with `name`, `words` (SHA-256 as
-- eight signed numbers), and the optional `pipelines` (names between bars), `requests` and `items`
-- per second. What the key may do is written into the metadata `triptych`. The key itself is not
-- forwarded.

local band, bnot, bor, bxor = bit.band, bit.bnot, bit.bor, bit.bxor
local lshift, ror, rshift, tobit = bit.lshift, bit.ror, bit.rshift, bit.tobit
local byte, char, find, match = string.byte, string.char, string.find, string.match
local MAX_KEY_BYTES = 4096
local GRPC_STATUS = {["401"] = "16", ["403"] = "7"}

-- FIPS 180-4: fractions of the roots of the first primes.
local ROUNDS, START = {}, {}
local number = 2
while #ROUNDS < 64 do
  local divisor = 2
  while number % divisor ~= 0 do
    divisor = divisor + 1
  end
  if divisor == number then
    ROUNDS[#ROUNDS + 1] = tobit(math.floor(number ^ (1 / 3) % 1 * 2 ^ 32))
    if #START < 8 then
      START[#START + 1] = tobit(math.floor(number ^ 0.5 % 1 * 2 ^ 32))
    end
  end
  number = number + 1
end

local function sha256(text)
  local bits = #text * 8
  local size = char(rshift(bits, 24), band(rshift(bits, 16), 255), band(rshift(bits, 8), 255), band(bits, 255))
  local data = text .. "\128" .. string.rep("\0", (55 - #text) % 64) .. "\0\0\0\0" .. size
  local state, w = {unpack(START)}, {}
  for from = 1, #data, 64 do
    for i = 1, 16 do
      local first, second, third, fourth = byte(data, from + 4 * i - 4, from + 4 * i - 1)
      w[i] = bor(lshift(first, 24), lshift(second, 16), lshift(third, 8), fourth)
    end
    for i = 17, 64 do
      local x, y = w[i - 15], w[i - 2]
      local low = bxor(ror(x, 7), ror(x, 18), rshift(x, 3))
      w[i] = tobit(w[i - 16] + low + w[i - 7] + bxor(ror(y, 17), ror(y, 19), rshift(y, 10)))
    end
    local a, b, c, d, e, f, g, h = unpack(state)
    for i = 1, 64 do
      local chosen = bxor(band(e, f), band(bnot(e), g))
      local t = h + bxor(ror(e, 6), ror(e, 11), ror(e, 25)) + chosen + ROUNDS[i] + w[i]
      local major = bxor(band(a, b), band(a, c), band(b, c))
      local sum = bxor(ror(a, 2), ror(a, 13), ror(a, 22)) + major
      h, g, f, e, d, c, b, a = g, f, e, tobit(d + t), c, b, a, tobit(t + sum)
    end
    for i, value in ipairs({a, b, c, d, e, f, g, h}) do
      state[i] = tobit(state[i] + value)
    end
  end
  return state
end

-- Compares with every key in full, so that the time does not depend on the key.
local function find_key(key)
  local found
  local given = sha256(key)
  for _, entry in ipairs(KEYS) do
    local differs = 0
    for i = 1, 8 do
      differs = bor(differs, bxor(given[i], entry.words[i]))
    end
    if differs == 0 then
      found = entry
    end
  end
  return found
end

local function is_grpc(headers)
  return find(headers:get("content-type") or "", "application/grpc", 1, true) == 1
end

local function reject(handle, status, text)
  local answer = {[":status"] = status}
  if is_grpc(handle:headers()) then
    answer["grpc-status"] = GRPC_STATUS[status]
  else
    answer["content-type"], text = "application/json", '{"error":"' .. text .. '"}'
    answer["www-authenticate"] = status == "401" and "Bearer" or nil
  end
  handle:respond(answer, text)
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local path = headers:get(":path")
  if find(path, "^/v2/health/") or find(path, "^/grpc%.health%.v1%.Health/") then
    return
  end
  local metadata = handle:streamInfo():dynamicMetadata()
  local key = match(headers:get("authorization") or "", "^[Bb][Ee][Aa][Rr][Ee][Rr] +(%S+)%s*$")
  local entry = key and #key <= MAX_KEY_BYTES and find_key(key)
  if not entry then
    local given = key and "another key" or "no key"
    return reject(handle, "401", "authorization must be Bearer and a key of this server. Given: "
      .. given .. ". Ask its operator for one.")
  end
  if entry.gateway_only then
    return reject(handle, "403", "The key has a limit of " .. entry.gateway_only
      .. ", which only the HTTP gateway counts: use its address.")
  end
  headers:remove("authorization")
  local pipeline = match(path, "^/v2/models/([%w_.-]*)")
  if entry.pipelines and pipeline and not find(entry.pipelines, "|" .. pipeline .. "|", 1, true) then
    return reject(handle, "403", "The key may not use pipeline " .. pipeline .. ".")
  end
  for field, value in pairs(entry) do
    if field ~= "words" then
      metadata:set("triptych", field, value)
    end
  end
end

-- A request over a limit gets the time to wait, for gRPC as steps of pipelines give it.
function envoy_on_response(handle)
  local headers = handle:headers()
  local limit = headers:get("x-key-limited")
  if limit == nil then
    return
  end
  headers:remove("x-key-limited")
  local seconds = tonumber(headers:get("x-ratelimit-reset")) or 0
  seconds = math.max(seconds, 1)
  headers:replace("retry-after", tostring(seconds))
  if headers:get("grpc-status") then
    headers:replace("grpc-message", "[overloaded retry_after_ms=" .. seconds .. "000] The limit of "
      .. limit .. " per second of the key is reached. Try again in " .. seconds .. " s.")
  end
end
