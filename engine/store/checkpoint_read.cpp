#include "engine/store/checkpoint_read.h"

#include <xxhash.h>

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

constexpr int64_t kMaxManifestBytes = int64_t{256} << 20;
constexpr int64_t kMaxTelemetryBytes = int64_t{16} << 20;
constexpr int64_t kMaxLatestBytes = 4096;

bool starts_with(const std::string& text, const std::string& start) { return text.rfind(start, 0) == 0; }

bool starts_with_one(const std::string& text, const std::vector<std::string>& starts) {
  return std::any_of(starts.begin(), starts.end(),
                     [&](const std::string& start) { return starts_with(text, start); });
}

std::string read_part(const std::string& path, int64_t max_bytes) {
  try {
    return read_small_file(path, max_bytes);
  } catch (const MissingInputError& error) {
    throw BadDataError(error.what());  // a part that is gone is damage of the checkpoint
  }
}

}  // namespace

std::string checkpoint_name(const CheckpointNumber& n) {
  return detail::concat("step_", n.stage, "_", n.step, "_", n.update);
}

std::optional<CheckpointNumber> checkpoint_number(const std::string& name) {
  constexpr size_t kMaxDigits = 18;
  if (!starts_with(name, "step_")) return std::nullopt;
  std::vector<int64_t> numbers;
  std::istringstream in(name.substr(5));
  for (std::string part; std::getline(in, part, '_');) {
    const bool digits = !part.empty() && part.size() <= kMaxDigits &&
                        part.find_first_not_of("0123456789") == std::string::npos;
    if (!digits) return std::nullopt;
    numbers.push_back(std::stoll(part));
  }
  if (numbers.size() != 3) return std::nullopt;
  const CheckpointNumber out{numbers[0], numbers[1], numbers[2]};
  if (checkpoint_name(out) != name) return std::nullopt;  // leading zeros, a trailing underscore
  return out;
}

std::vector<CheckpointNumber> list_checkpoints(const std::string& dir) {
  std::vector<CheckpointNumber> out;
  for (const std::string& name : names_in(dir)) {
    const auto number = checkpoint_number(name);
    if (number) out.push_back(*number);
  }
  std::sort(out.begin(), out.end(), std::greater<>());
  return out;
}

std::optional<CheckpointNumber> latest_checkpoint(const std::string& dir) {
  try {
    std::string name = read_small_file(dir + "/latest", kMaxLatestBytes);
    while (!name.empty() && name.back() == '\n') name.pop_back();
    return checkpoint_number(name);
  } catch (const Error&) {
    return std::nullopt;  // the folders themselves say which are there
  }
}

std::vector<CheckpointNumber> checkpoints_to_try(const std::string& dir) {
  std::vector<CheckpointNumber> numbers = list_checkpoints(dir);
  const std::optional<CheckpointNumber> latest = latest_checkpoint(dir);
  std::stable_sort(numbers.begin(), numbers.end(), [&](const CheckpointNumber& a, const CheckpointNumber& b) {
    return latest && !(*latest < a) && *latest < b;
  });
  return numbers;
}

CheckpointReader::CheckpointReader(const std::string& path) : path_(path) {
  const std::string file = path + "/manifest.json";
  manifest_ = parse_manifest(file, read_part(file, kMaxManifestBytes));
  for (const ShardEntry& s : manifest_.shards) {
    try {
      shards_.push_back(std::make_unique<SafetensorsFile>(path + "/" + s.file));
    } catch (const Error& error) {
      // A file that is cut or gone names no tensor by itself: say which one it held.
      std::string first;
      for (const TensorEntry& t : manifest_.tensors) {
        if (t.shard == static_cast<int64_t>(shards_.size()) && first.empty()) first = t.name;
      }
      throw BadDataError(detail::concat(error.what(), " (shard of tensor '", printable(first), "')"));
    }
  }
  check_shards();
}

void CheckpointReader::check_shards() const {
  std::vector<size_t> held(shards_.size(), 0);
  for (const TensorEntry& t : manifest_.tensors) {
    const SafetensorsFile& file = *shards_[static_cast<size_t>(t.shard)];
    const StoredTensor& stored = file.find(t.name);
    if (stored.dtype != t.dtype || stored.dims != t.dims) {
      throw BadDataError(detail::concat(
          "'", printable(file.path()), "': tensor '", printable(t.name), "' is ", stored.dtype.name(), " ",
          dims_text(stored.dims), ", the manifest says ", safetensors_name(t.dtype), " ", dims_text(t.dims)));
    }
    ++held[static_cast<size_t>(t.shard)];
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    const SafetensorsFile& file = *shards_[i];
    if (file.tensors().size() != held[i]) {
      for (const StoredTensor& stored : file.tensors()) {
        const auto it = std::find_if(manifest_.tensors.begin(), manifest_.tensors.end(),
                                     [&](const TensorEntry& t) { return t.name == stored.name; });
        if (it != manifest_.tensors.end() && it->shard == static_cast<int64_t>(i)) continue;
        throw BadDataError(detail::concat("'", printable(file.path()), "': tensor '", printable(stored.name),
                                          "' is not in the manifest"));
      }
    }
    const ShardEntry& entry = manifest_.shards[i];
    if (file.header_hash() != entry.header_hash || file.file_bytes() != entry.bytes) {
      const std::string first = file.tensors().empty() ? "" : printable(file.tensors()[0].name);
      throw BadDataError(detail::concat("'", printable(file.path()),
                                        "': the header differs from the one written", " (first tensor '",
                                        first, "')"));
    }
  }
}

std::vector<uint8_t> CheckpointReader::read(const TensorEntry& tensor) const {
  const SafetensorsFile& file = *shards_[static_cast<size_t>(tensor.shard)];
  std::vector<uint8_t> bytes = file.read(file.find(tensor.name));
  const uint64_t hash = XXH3_64bits(bytes.data(), bytes.size());
  if (hash != tensor.hash) {
    throw BadDataError(detail::concat("'", printable(file.path()), "': tensor '", printable(tensor.name),
                                      "' has hash ", hex16(hash), ", the manifest says ",
                                      hex16(tensor.hash)));
  }
  return bytes;
}

void CheckpointReader::verify() const {
  for (const TensorEntry& t : manifest_.tensors) read(t);
}

RunState CheckpointReader::state(std::vector<std::string>* notes) const {
  RunState state = manifest_.state;
  std::map<std::string, const TensorEntry*> arrays;
  for (const TensorEntry& t : manifest_.tensors) {
    if (starts_with(t.name, kRolloutPrefix)) arrays[t.name] = &t;
  }
  if (!arrays.empty()) {
    try {
      const auto find = [&](const std::string& name) {
        const auto it = arrays.find(name);
        if (it == arrays.end()) throw BadDataError("tensor '" + printable(name) + "' is missing");
        const TensorEntry& t = *it->second;
        HostArray array{t.name, t.dtype, t.dims, read(t)};
        arrays.erase(it);
        return array;
      };
      state.rollout =
          rollout_from_arrays(find, [&](const std::string& name) { return arrays.count(name) > 0; });
      if (!arrays.empty())
        throw BadDataError("tensor '" + printable(arrays.begin()->first) + "' is left over");
      state.rollout.check();
    } catch (const Error& error) {
      throw BadDataError(detail::concat("checkpoint '", printable(path_), "': rollout: ", error.what()));
    }
  }
  const std::string file = path_ + "/telemetry.json";
  try {
    state.telemetry_json = read_small_file(file, kMaxTelemetryBytes);
    if (!nlohmann::json::accept(state.telemetry_json))
      throw BadDataError("'" + printable(file) + "' is no JSON");
  } catch (const Error& error) {
    // Times only: a run goes on without them, and says so.
    state.telemetry_json = "{}";
    notes->push_back(detail::concat(error.what(), "; times and restarts are counted anew"));
  }
  return state;
}

CheckpointInfo read_checkpoint_info(const std::string& path, bool verify_hashes) {
  const CheckpointReader reader(path);
  if (verify_hashes) reader.verify();
  CheckpointInfo info;
  info.path = path;
  info.state = reader.state(&info.notes);
  info.content_hash = hex16(content_hash(reader.manifest()));
  for (const TensorEntry& t : reader.manifest().tensors) {
    if (!starts_with(t.name, kRolloutPrefix)) info.tensor_names.push_back(t.name);
  }
  return info;
}

void load_tensors(Queue& queue, const std::string& path, const std::vector<NamedTensor>& tensors,
                  const std::vector<std::string>& optional_prefixes, const TensorParts& parts) {
  const CheckpointReader reader(path);
  const auto refuse = [&](const std::string& name, const std::string& why) {
    throw BadDataError(
        detail::concat("checkpoint '", printable(path), "': tensor '", printable(name), "' ", why));
  };
  std::map<std::string, const TensorEntry*> stored;
  for (const TensorEntry& t : reader.manifest().tensors) {
    if (!starts_with(t.name, kRolloutPrefix)) stored[t.name] = &t;
  }
  // Everything is matched before anything is written.
  std::vector<std::pair<const TensorEntry*, const NamedTensor*>> pairs;
  for (const NamedTensor& wanted : tensors) {
    const auto it = stored.find(wanted.name);
    if (it == stored.end()) {
      if (!starts_with_one(wanted.name, optional_prefixes)) refuse(wanted.name, "is missing");
      continue;
    }
    const TensorEntry& t = *it->second;
    const auto part = parts.find(wanted.name);
    const Shape& shape = part == parts.end() ? wanted.view.shape : part->second.whole;
    if (t.dtype != wanted.view.dtype || t.dims != dims_of(shape)) {
      refuse(t.name, detail::concat("is ", safetensors_name(t.dtype), " ", dims_text(t.dims),
                                    ", this run's is ", safetensors_name(wanted.view.dtype), " ", shape));
    }
    pairs.emplace_back(&t, &wanted);
    stored.erase(it);
  }
  for (const auto& [name, entry] : stored) {
    if (!starts_with_one(name, optional_prefixes)) refuse(name, "is unknown to this run");
  }
  for (const auto& [entry, wanted] : pairs) {
    const std::vector<uint8_t> bytes = reader.read(*entry);
    const auto part = parts.find(wanted->name);
    const int64_t first = part == parts.end() ? 0 : part->second.first * dtype_bytes(wanted->view.dtype);
    const int64_t count = wanted->view.bytes();
    if (count > 0) queue.copy_from_host(wanted->view.data, bytes.data() + first, count);
  }
}

std::string find_checkpoint(const std::string& path) {
  if (path_exists(path + "/manifest.json")) return path;
  for (const std::string& dir : {path, path + "/checkpoints"}) {
    const std::vector<CheckpointNumber> candidates = checkpoints_to_try(dir);
    if (!candidates.empty()) return dir + "/" + checkpoint_name(candidates.front());
  }
  throw MissingInputError("'" + printable(path) + "' is neither a checkpoint nor a run folder with one");
}

}  // namespace fp4t
