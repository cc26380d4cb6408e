-- Rejects requests that a server must not get: compressed ones, those for a model that is no
-- pipeline, and those with a BYTES tensor whose string lengths do not fit its data. Triton would
-- fail all requests of a batch with such a tensor.
-- `IS_GRPC` and `MAX_BYTES`, the maximum size of a message, are set above. The context of the
-- route has the names of the pipelines and `*` as keys; each wait for the body ends what it
-- returned. A Lua error would let the request pass, so that every check runs in `pcall`.
-- With keys, the metadata `triptych` has what the key may do (see keys.lua), and gets the number of items.

local byte, find, gmatch, match, sub = string.byte, string.find, string.gmatch, string.match, string.sub
local MAX_FIELDS = 4096
local MAX_JSON_BYTES = 65536
local MAX_JSON_DEPTH = 8
local INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, EXHAUSTED, UNIMPLEMENTED = 3, 5, 7, 8, 12
local HTTP_STATUS = {[INVALID_ARGUMENT] = 400, [NOT_FOUND] = 404, [UNIMPLEMENTED] = 415}
local MALFORMED = "The request is malformed"

-- `fault` ends a check: `pcall` returns its table.
local function fault(status, text)
  error({status = status, text = text}, 0)
end

local function malformed(what)
  fault(INVALID_ARGUMENT, MALFORMED .. ": " .. what)
end

-- Returns the fault of a check, or nil.
local function fault_of(check, ...)
  local passed, found = pcall(check, ...)
  if passed then
    return nil
  end
  if type(found) == "table" then
    return found
  end
  return {status = INVALID_ARGUMENT, text = MALFORMED .. ": " .. tostring(found)}
end

local function varint(data, at, last)
  local value, factor = 0, 1
  for position = at, math.min(last, at + 9) do
    local part = byte(data, position)
    if part < 128 then
      return value + part * factor, position + 1
    end
    value = value + (part - 128) * factor
    factor = factor * 128
  end
  malformed("it ends within a number")
end

-- Calls `visit(number, first, last)` for each field of a protobuf message that has a length.
-- Other fields are passed as `visit(number, nil, nil, value)` if they are varints.
local function each_field(data, at, last, visit)
  local count = 0
  while at <= last do
    count = count + 1
    local tag, from = varint(data, at, last)
    -- Protobuf ignores the bits above 32, which would hide a field.
    if count > MAX_FIELDS or tag >= 4294967296 then
      malformed("it has too many fields or a wrong one")
    end
    local kind = tag % 8
    local number = (tag - kind) / 8
    if kind == 2 then
      local length
      length, from = varint(data, from, last)
      if length > last - from + 1 then
        malformed("a field is longer than the message")
      end
      visit(number, from, from + length - 1)
      at = from + length
    elseif kind == 0 then
      local value
      value, at = varint(data, from, last)
      visit(number, nil, nil, value)
    elseif kind == 5 then
      at = from + 4
    elseif kind == 1 then
      at = from + 8
    else
      malformed("it has a field of an unknown type")
    end
  end
  if at ~= last + 1 then
    malformed("it ends within a field")
  end
end

-- Each string of a BYTES tensor follows its length in four bytes, the lowest first.
local function check_strings(name, count, data, at, last)
  local found = 0
  while at + 3 <= last do
    local a, b, c, d = byte(data, at, at + 3)
    at = at + 4 + a + b * 256 + c * 65536 + d * 16777216
    found = found + 1
  end
  if at ~= last + 1 then
    fault(INVALID_ARGUMENT, "A string length in tensor " .. name .. " does not fit its data")
  end
  if found ~= count then
    fault(INVALID_ARGUMENT, "Tensor " .. name .. " has " .. found .. " strings, its shape " .. count)
  end
end

local function key_of(handle)
  return handle:streamInfo():dynamicMetadata():get("triptych")
end

local function check_name(name, handle)
  local key = key_of(handle)
  if key and key.pipelines and not find(key.pipelines, "|" .. name .. "|", 1, true) then
    fault(PERMISSION_DENIED, "The key may not use pipeline " .. match(name, "^[%w_.%-]*"))
  end
  if name == "*" or not handle:filterContext():get(name) then
    -- The second half is read by clients of Triton.
    local text = "This proxy only forwards requests for pipelines. Request for unknown model: '"
    fault(NOT_FOUND, text .. match(name, "^[%w_.%-]*") .. "' is not found")
  end
end

-- Counts the items of a request for the limit of its key, which holds those of one second.
local function count_items(items, handle)
  local key = key_of(handle)
  if key and key.items then
    if items > math.max(key.items, 1) then
      fault(INVALID_ARGUMENT, "The request has " .. items .. " rows, and the key may send "
        .. key.items .. " per second: send less at once")
    end
    local metadata = handle:streamInfo():dynamicMetadata()
    metadata:set("triptych", "count", items)
    metadata:set("triptych", "counted", key.name)
  end
end

-- Envoy's filter counts a stream once. Its messages are counted here, for all streams of a key that
-- this thread serves.
local buckets = {}
local function take(key, unit, count, now)
  local rate = key[unit]
  if rate == nil then
    return
  end
  local name = unit .. " " .. key.name
  local capacity = math.max(rate, 1)
  local bucket = buckets[name] or {level = capacity, at = now}
  buckets[name] = bucket
  bucket.level = math.min(capacity, bucket.level + (now - bucket.at) / 1000 * rate)
  bucket.at = now
  if bucket.level < count then
    local wait = math.ceil((count - bucket.level) / rate * 1000)
    fault(EXHAUSTED, "The limit of " .. unit .. " per second of the key is reached: wait " .. wait .. " ms")
  end
  bucket.level = bucket.level - count
end

-- A message whose field 1 is the name of a model; ModelInferRequest has inputs and contents.
-- Returns the number of rows.
local function check_message(data, at, last, handle)
  local inputs, contents, name = {}, {}, nil
  each_field(data, at, last, function(number, first, final)
    if first == nil then
      return
    elseif number == 1 then
      name = sub(data, first, final)
      check_name(name, handle)
    elseif number == 5 then
      inputs[#inputs + 1] = {first, final}
    elseif number == 7 then
      contents[#contents + 1] = {first, final}
    end
  end)
  if #contents > 0 and #contents ~= #inputs then
    malformed("it has " .. #inputs .. " inputs and " .. #contents .. " raw_input_contents")
  end
  local rows = 1
  for index, range in ipairs(inputs) do
    local tensor, datatype, count, first_dimension = "", "", 1, nil
    each_field(data, range[1], range[2], function(number, first, final, value)
      if number == 3 and value then
        count, first_dimension = count * value, first_dimension or value
      elseif first == nil then
        return
      elseif number == 1 then
        tensor = sub(data, first, final)
      elseif number == 2 then
        datatype = sub(data, first, final)
      elseif number == 3 then
        while first <= final do
          value, first = varint(data, first, final)
          count, first_dimension = count * value, first_dimension or value
        end
      end
    end)
    rows = math.max(rows, first_dimension or 1)
    local content = contents[index]
    if datatype == "BYTES" and content then
      check_strings(match(tensor, "^[%w_.%-]*"), count, data, content[1], content[2])
    end
  end
  return rows
end

local function check_unary(data, handle, is_inference)
  local a, b, c, d, e = byte(data, 1, 5)
  if a ~= 0 or ((b * 256 + c) * 256 + d) * 256 + e ~= #data - 5 then
    malformed("it is not one gRPC message without compression")
  end
  local rows = check_message(data, 6, #data, handle)
  if is_inference then
    count_items(rows, handle)
  end
end

-- Returns the value of a JSON text at a position, and the position behind it.
local json
local function json_string(data, at)
  local start = at
  while true do
    at = find(data, '["\\]', at)
    if at == nil then
      malformed("its JSON ends within a string")
    elseif byte(data, at) == 34 then
      return sub(data, start, at - 1), at + 1
    end
    at = at + 2
  end
end

local function after_space(data, at)
  at = find(data, "[^ \t\r\n]", at)
  if at == nil then
    malformed("its JSON ends early")
  end
  return at, sub(data, at, at)
end

local function json_members(data, at, depth, close, read)
  local kind
  at, kind = after_space(data, at)
  if kind == close then
    return at + 1
  end
  while true do
    at = read(at)
    at, kind = after_space(data, at)
    if kind == close then
      return at + 1
    elseif kind ~= "," or depth > MAX_JSON_DEPTH then
      malformed("its JSON is wrong or too deep")
    end
    at = after_space(data, at + 1)
  end
end

function json(data, at, depth)
  local kind
  at, kind = after_space(data, at)
  if depth > MAX_JSON_DEPTH then
    malformed("its JSON is too deep")
  elseif kind == '"' then
    return json_string(data, at + 1)
  elseif kind == "[" then
    local list = {}
    at = json_members(data, at + 1, depth, "]", function(from)
      list[#list + 1], from = json(data, from, depth + 1)
      return from
    end)
    return list, at
  elseif kind == "{" then
    local object = {}
    at = json_members(data, at + 1, depth, "}", function(from)
      local key, colon
      from, colon = after_space(data, from)
      key, from = json_string(data, from + 1)
      -- An escaped or repeated key could mean another value to the server.
      if colon ~= '"' or find(key, "\\", 1, true) or object[key] ~= nil then
        malformed("its JSON has a wrong key")
      end
      from, colon = after_space(data, from)
      if colon ~= ":" then
        malformed("its JSON has a key without a value")
      end
      object[key], from = json(data, from + 1, depth + 1)
      return from
    end)
    return object, at
  end
  local word = match(data, "^[%w+.%-]+", at)
  if word == nil then
    malformed("its JSON is wrong")
  end
  return tonumber(word) or word, at + #word
end

-- The body of a request with binary tensors: JSON of `size` bytes, and the tensors in order.
local function check_binary(data, size)
  local request = json(sub(data, 1, size), 1, 0)
  local at = size + 1
  for _, input in ipairs(request.inputs) do
    local length = (input.parameters or {}).binary_data_size
    if length ~= nil then
      if type(length) ~= "number" or length < 0 or length % 1 ~= 0 or at + length - 1 > #data then
        malformed("a binary_data_size does not fit the body")
      end
      if find(input.datatype, "\\", 1, true) then
        malformed("a datatype is escaped")
      end
      if input.datatype == "BYTES" then
        local count = 1
        for _, dimension in ipairs(input.shape) do
          count = count * dimension
        end
        check_strings(match(input.name, "^[%w_.%-]*"), count, data, at, at + length - 1)
      end
      at = at + length
    end
  end
end

local function respond(handle, found)
  if IS_GRPC then
    -- Envoy makes a gRPC status of the one for HTTP, which this replaces.
    handle:respond({[":status"] = "400", ["grpc-status"] = tostring(found.status)}, found.text)
  else
    local headers = {[":status"] = tostring(HTTP_STATUS[found.status])}
    headers["content-type"] = "application/json"
    handle:respond(headers, '{"error":"' .. found.text:gsub('[%c"\\]', " ") .. '"}')
  end
end

-- Messages of a stream are forwarded once they are complete. Headers are forwarded by then, so that
-- a wrong message can only be replaced: by one whose name of a model is the error, which Triton
-- returns in the stream.
local function replacement(text)
  local name = sub(text, 1, 120)
  return "\0\0\0\0" .. string.char(#name + 2, 10, #name) .. name
end

local function check_streamed(data, at, final, handle)
  local rows = check_message(data, at, final, handle)
  local key = key_of(handle)
  if key then
    take(key, "items", rows, handle:timestamp())
    if key.has_streamed then
      take(key, "requests", 1, handle:timestamp())
    end
    handle:streamInfo():dynamicMetadata():set("triptych", "has_streamed", true)
  end
end

-- Returns what is forwarded in place of a complete message from `at` to `final`.
local function checked_message(data, at, final, handle)
  if byte(data, at) ~= 0 then
    return replacement("Messages of streams must not be compressed")
  end
  local found = fault_of(check_streamed, data, at + 5, final, handle)
  return found and replacement(found.text) or sub(data, at, final)
end

-- Returns what is forwarded of the messages in `data`, the position of the first one that is not
-- complete, and how many bytes of it are needed. The position is behind the end of `data` if the
-- rest of a message is still to be dropped.
local function check_messages(data, handle)
  local out, at = {}, 1
  while #data - at >= 4 do
    local _, b, c, d, e = byte(data, at, at + 4)
    local length = ((b * 256 + c) * 256 + d) * 256 + e
    local final = at + 4 + length
    if length > MAX_BYTES then
      local text = "A message of the stream is larger than " .. MAX_BYTES .. " bytes"
      out[#out + 1] = replacement(text)
    elseif final > #data then
      return table.concat(out), at, 5 + length
    else
      out[#out + 1] = checked_message(data, at, final, handle)
    end
    at = final + 1
  end
  return table.concat(out), at, 5
end

local function check_stream(handle)
  local parts, have, need, dropped = {}, 0, 5, 0
  for chunk in handle:bodyChunks() do
    local size, out, at = chunk:length(), "", nil
    local received = size > 0 and chunk:getBytes(0, size) or ""
    local part = math.min(dropped, size)
    dropped = dropped - part
    parts[#parts + 1], have = sub(received, part + 1), have + size - part
    if have >= need then
      local data = table.concat(parts)
      out, at, need = check_messages(data, handle)
      dropped = math.max(at - 1 - #data, 0)
      parts, have = {sub(data, at)}, math.max(#data + 1 - at, 0)
    end
    if out ~= received then
      chunk:setBytes(out)
    end
  end
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local encoding = headers:get(IS_GRPC and "grpc-encoding" or "content-encoding")
  if encoding ~= nil and encoding ~= "identity" then
    local text = "The request is compressed (" .. match(encoding, "^[%w_.%-]*")
    text = text .. "), which this proxy does not accept: send it without compression"
    return respond(handle, {status = UNIMPLEMENTED, text = text})
  end
  local found
  if IS_GRPC then
    if not handle:filterContext():get("*") then
      return -- It has no route, so that it is not forwarded.
    end
    local path = headers:get(":path")
    if find(path, "Stream", 1, true) then
      return check_stream(handle)
    end
    local body = handle:body()
    if body ~= nil and body:length() > 0 then
      local is_inference = find(path, "/ModelInfer", 1, true) ~= nil
      found = fault_of(check_unary, body:getBytes(0, body:length()), handle, is_inference)
    end
  else
    local key, path = key_of(handle), headers:get(":path")
    local counts = key and key.items and (find(path, "/infer", 1, true) or find(path, "/generate", 1, true))
    local size = headers:get("inference-header-content-length")
    local has_binary = size ~= nil and size ~= "0"
    local body = (counts or has_binary) and handle:body() or nil
    if counts then
      local rows = 1
      for dimension in gmatch(body and body:getBytes(0, body:length()) or "", '"shape"%s*:%s*%[%s*(%d+)') do
        rows = math.max(rows, tonumber(dimension))
      end
      found = fault_of(count_items, rows, handle)
    end
    if found or not has_binary then
      return found and respond(handle, found)
    end
    size = tonumber(match(size, "^%d+$"))
    if size == nil or body == nil or size > body:length() or size > MAX_JSON_BYTES then
      local text = "Inference-Header-Content-Length must be at most the size of the body and "
      found = {status = INVALID_ARGUMENT, text = text .. MAX_JSON_BYTES}
    else
      found = fault_of(check_binary, body:getBytes(0, body:length()), size)
    end
  end
  if found then
    respond(handle, found)
  end
end
