#include "engine/store/manifest.h"

#include <xxhash.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/store/safetensors.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormatName = "fp4train checkpoint";
constexpr const char* kHashLead = ",\n \"manifest_hash\": \"";
constexpr const char* kHashTail = "\"\n}\n";
constexpr size_t kHexDigits = 16;
constexpr int kMaxDepth = 8;

uint64_t from_hex16(const std::string& text) {
  uint64_t value = 0;
  if (text.size() != kHexDigits) throw BadDataError("hash '" + printable(text) + "' is not 16 hex digits");
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9', letter = c >= 'a' && c <= 'f';
    if (!digit && !letter) throw BadDataError("hash '" + printable(text) + "' is not 16 hex digits");
    value = value << 4 | static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return value;
}

Json from_double(double value) {
  if (std::isfinite(value)) return value;
  return {{"bits", hex16(std::bit_cast<uint64_t>(value))}};
}

double to_double(const Json& json) {
  if (json.is_number()) return json.get<double>();
  return std::bit_cast<double>(from_hex16(json.at("bits").get<std::string>()));
}

Json from_text(const std::string& text) {
  const Json json = text;
  try {
    (void)json.dump();
    return json;
  } catch (const Json::exception&) {  // not UTF-8
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string hex;
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      hex += {kDigits[byte >> 4], kDigits[byte & 15]};
    }
    return {{"hex", hex}};
  }
}

std::string to_text(const Json& json) {
  if (json.is_string()) return json.get<std::string>();
  const std::string hex = json.at("hex").get<std::string>();
  std::string text;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    text += static_cast<char>(from_hex16(std::string(kHexDigits - 2, '0') + hex.substr(i, 2)));
  }
  return text;
}

template <class T>
T member(const Json& json, const char* name) {
  if (!json.at(name).is_number_integer()) throw BadDataError(std::string(name) + " is no whole number");
  const T value = json.at(name).get<T>();
  if (value < 0) throw BadDataError(std::string(name) + " is negative");
  return value;
}

// The whole numbers of a state by name, once for writing, reading and hashing.
struct WholeNumber {
  const char* name;
  int64_t RunState::*field;
};
constexpr WholeNumber kWholeNumbers[] = {
    {"stage", &RunState::stage},
    {"step", &RunState::step},
    {"update", &RunState::update},
    {"attempted_updates", &RunState::attempted_updates},
    {"applied_updates", &RunState::applied_updates},
    {"next_sample", &RunState::next_sample},
    {"metrics_lines", &RunState::metrics_lines},
};

Json state_json(const RunState& state) {
  Json out = Json::object();
  for (const WholeNumber& n : kWholeNumbers) out[n.name] = state.*n.field;
  Json counters = Json::object(), texts = Json::object(), lineage = Json::array();
  for (const auto& [name, value] : state.counters) counters[name] = from_double(value);
  for (const auto& [name, value] : state.texts) texts[name] = from_text(value);
  for (const std::string& line : state.lineage) lineage.push_back(from_text(line));
  out["counters"] = counters;
  out["texts"] = texts;
  out["precision_hash"] = state.precision_hash;
  out["lineage"] = lineage;
  out["recipe_yaml"] = from_text(state.recipe_yaml);
  return out;
}

RunState state_from(const Json& json) {
  RunState state;
  for (const WholeNumber& n : kWholeNumbers) state.*n.field = member<int64_t>(json, n.name);
  for (const auto& [name, value] : json.at("counters").items()) state.counters[name] = to_double(value);
  for (const auto& [name, value] : json.at("texts").items()) state.texts[name] = to_text(value);
  state.precision_hash = json.at("precision_hash").get<std::string>();
  for (const Json& line : json.at("lineage")) state.lineage.push_back(to_text(line));
  state.recipe_yaml = to_text(json.at("recipe_yaml"));
  return state;
}

Json tensor_json(const TensorEntry& t) {
  return {{"name", t.name},
          {"dtype", safetensors_name(t.dtype)},
          {"shape", t.dims},
          {"shard", t.shard},
          {"hash", hex16(t.hash)}};
}

TensorEntry tensor_from(const Json& json, size_t num_shards) {
  TensorEntry t;
  t.name = json.at("name").get<std::string>();
  t.dtype = dtype_from_safetensors(json.at("dtype").get<std::string>());
  for (const Json& d : json.at("shape")) {
    if (!d.is_number_unsigned()) throw BadDataError("tensor '" + printable(t.name) + "' has a bad shape");
    t.dims.push_back(d.get<int64_t>());
  }
  t.shard = member<int64_t>(json, "shard");
  if (static_cast<size_t>(t.shard) >= num_shards) {
    throw BadDataError(
        detail::concat("tensor '", printable(t.name), "' names shard ", t.shard, " of ", num_shards));
  }
  t.hash = from_hex16(json.at("hash").get<std::string>());
  return t;
}

// Depth-limited, so that hostile nesting cannot exhaust the stack or the memory.
Json parse_json(const std::string& text) {
  const auto shallow = [](int depth, Json::parse_event_t, Json&) {
    if (depth > kMaxDepth) throw BadDataError("nested too deeply");
    return true;
  };
  return Json::parse(text, shallow);
}

Manifest manifest_from(const Json& json) {
  if (json.at("format").get<std::string>() != kFormatName) throw BadDataError("not a checkpoint's manifest");
  const auto version = member<int64_t>(json, "format_version");
  if (version != kCheckpointFormatVersion) {
    throw BadDataError(
        detail::concat("format version ", version, ", this build reads ", kCheckpointFormatVersion));
  }
  Manifest out;
  out.program_version = json.at("fp4train_version").get<std::string>();
  out.state = state_from(json.at("state"));
  for (const Json& s : json.at("shards")) {
    out.shards.push_back({s.at("file").get<std::string>(), member<int64_t>(s, "bytes"),
                          from_hex16(s.at("header_hash").get<std::string>())});
    // The name is ours by rule; a path out of the folder must not come from a file.
    const std::string expected = shard_file_name(static_cast<int64_t>(out.shards.size()) - 1);
    if (out.shards.back().file != expected) {
      throw BadDataError("shard '" + printable(out.shards.back().file) + "' instead of '" + expected + "'");
    }
  }
  std::set<std::string> names;
  for (const Json& t : json.at("tensors")) {
    out.tensors.push_back(tensor_from(t, out.shards.size()));
    if (!names.insert(out.tensors.back().name).second) {
      throw BadDataError("tensor '" + printable(out.tensors.back().name) + "' is there twice");
    }
  }
  const std::string recorded = json.at("content_hash").get<std::string>();
  if (recorded != hex16(content_hash(out))) {
    throw BadDataError(detail::concat("content hash is ", printable(recorded), ", the content's is ",
                                      hex16(content_hash(out))));
  }
  return out;
}

// Length-prefixed fields, so that no two contents run into the same bytes.
class HashText {
 public:
  void add(const std::string& text) {
    add(text.size());
    bytes_ += text;
  }
  void add(uint64_t value) {
    for (int i = 0; i < 8; ++i) bytes_ += static_cast<char>((value >> (8 * i)) & 0xFF);
  }
  uint64_t hash() const { return XXH3_64bits(bytes_.data(), bytes_.size()); }

 private:
  std::string bytes_;
};

}  // namespace

std::string shard_file_name(int64_t idx) {
  char name[64];
  std::snprintf(name, sizeof name, "tensors-%05lld.safetensors", static_cast<long long>(idx + 1));
  return name;
}

std::string hex16(uint64_t value) {
  char text[kHexDigits + 1];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

uint64_t content_hash(const Manifest& manifest) {
  HashText text;
  const RunState& state = manifest.state;
  for (const WholeNumber& n : kWholeNumbers) text.add(static_cast<uint64_t>(state.*n.field));
  text.add(state.counters.size());
  for (const auto& [name, value] : state.counters) {
    text.add(name);
    text.add(std::bit_cast<uint64_t>(value));
  }
  text.add(state.texts.size());
  for (const auto& [name, value] : state.texts) {
    text.add(name);
    text.add(value);
  }
  text.add(state.precision_hash);
  text.add(state.lineage.size());
  for (const std::string& line : state.lineage) text.add(line);
  text.add(manifest.tensors.size());
  for (const TensorEntry& t : manifest.tensors) {
    text.add(t.name);
    text.add(std::string(safetensors_name(t.dtype)));
    text.add(t.dims.size());
    for (const int64_t d : t.dims) text.add(static_cast<uint64_t>(d));
    text.add(t.hash);
  }
  return text.hash();
}

std::string manifest_text(const Manifest& manifest) {
  Json out = Json::object();
  out["format"] = kFormatName;
  out["format_version"] = kCheckpointFormatVersion;
  out["fp4train_version"] = manifest.program_version;
  out["content_hash"] = hex16(content_hash(manifest));
  out["state"] = state_json(manifest.state);
  Json shards = Json::array(), tensors = Json::array();
  for (const ShardEntry& s : manifest.shards) {
    shards.push_back({{"file", s.file}, {"bytes", s.bytes}, {"header_hash", hex16(s.header_hash)}});
  }
  for (const TensorEntry& t : manifest.tensors) tensors.push_back(tensor_json(t));
  out["shards"] = shards;
  out["tensors"] = tensors;
  std::string text = out.dump(1);
  text.resize(text.size() - 2);  // "\n}", which follows the hash
  return with_manifest_hash(std::move(text));
}

std::string with_manifest_hash(std::string body) {
  const std::string hash = hex16(XXH3_64bits(body.data(), body.size()));
  return std::move(body) + kHashLead + hash + kHashTail;
}

Manifest parse_manifest(const std::string& path, const std::string& text) {
  const size_t tail = std::string(kHashLead).size() + kHexDigits + std::string(kHashTail).size();
  const std::string body = text.substr(0, text.size() - std::min(text.size(), tail));
  if (text.size() < tail || text != with_manifest_hash(body)) {
    throw BadDataError("'" + printable(path) +
                       "' is damaged: its text does not match the hash in its last line");
  }
  try {
    return manifest_from(parse_json(text));
  } catch (const Json::exception& error) {
    throw BadDataError("'" + printable(path) + "': " + printable(error.what()));
  } catch (const BadDataError& error) {
    throw BadDataError("'" + printable(path) + "': " + error.what());
  }
}

}  // namespace fp4t
