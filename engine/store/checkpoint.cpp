#include "engine/store/checkpoint.h"

#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "engine/store/checkpoint_read.h"
#include "engine/store/manifest.h"
#include "engine/store/rollout_arrays.h"
#include "engine/store/safetensors.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;

// Leftovers carry one of these; a checkpoint's own name never does.
constexpr const char* kTemporary = ".tmp.";
constexpr const char* kReplaced = ".replaced";

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// A tensor to be written: of the run (maybe on a device) or of the rollout (host).
struct Outgoing {
  std::string name;
  DType dtype;
  std::vector<int64_t> dims;
  const void* data;
  enum class Where : uint8_t { kHost, kDevice, kOnRanks } where;
};

std::vector<Outgoing> outgoing_tensors(const Queue& queue, const std::vector<NamedTensor>& tensors,
                                       const std::vector<HostArray>& rollout, const TensorParts& parts) {
  using Where = Outgoing::Where;
  const Where here = queue.backend() == Backend::kCpu ? Where::kHost : Where::kDevice;
  std::vector<Outgoing> out;
  for (const NamedTensor& t : tensors) {
    FP4T_CHECK(t.name.rfind(kRolloutPrefix, 0) != 0, "tensor '", t.name, "' has a reserved name");
    const auto part = parts.find(t.name);
    if (part == parts.end()) {
      out.push_back({t.name, t.view.dtype, dims_of(t.view.shape), t.view.data, here});
    } else {
      out.push_back({t.name, t.view.dtype, dims_of(part->second.whole), nullptr, Where::kOnRanks});
    }
  }
  for (const HostArray& a : rollout) out.push_back({a.name, a.dtype, a.dims, a.bytes.data(), Where::kHost});
  std::sort(out.begin(), out.end(), [](const Outgoing& a, const Outgoing& b) { return a.name < b.name; });
  for (size_t i = 1; i < out.size(); ++i) {
    FP4T_CHECK(out[i].name != out[i - 1].name, "tensor '", out[i].name, "' is given twice");
  }
  return out;
}

// Groups outgoing [begin, end) into shards of at most `limit` bytes; a larger tensor has a shard of its own.
std::vector<std::pair<size_t, size_t>> cut_shards(const std::vector<Outgoing>& outgoing, int64_t limit) {
  std::vector<std::pair<size_t, size_t>> shards;
  int64_t filled = 0;
  for (size_t i = 0; i < outgoing.size(); ++i) {
    const int64_t bytes = stored_bytes(outgoing[i].dtype, outgoing[i].dims);
    if (shards.empty() || (filled > 0 && filled + bytes > limit)) {
      shards.emplace_back(i, i);
      filled = 0;
    }
    shards.back().second = i + 1;
    filled += bytes;
  }
  return shards;
}

// Writes outgoing [begin, end) and enters them into the manifest.
void write_shard(Queue& queue, const std::string& folder, const std::vector<Outgoing>& outgoing,
                 std::pair<size_t, size_t> range, const FetchWhole& fetch, const SaveHook& hook,
                 Manifest* manifest) {
  const auto shard = static_cast<int64_t>(manifest->shards.size());
  const std::string file = shard_file_name(shard);
  std::vector<TensorToStore> tensors;
  for (size_t i = range.first; i < range.second; ++i) {
    tensors.push_back({outgoing[i].name, outgoing[i].dtype, outgoing[i].dims, nullptr});
  }
  SafetensorsWriter writer(folder + "/" + file, std::move(tensors), {}, hook);
  std::vector<uint8_t> staging;
  for (size_t k = 0; k < writer.order().size(); ++k) {
    const TensorToStore& t = writer.order()[k];
    const Outgoing& tensor =
        *std::lower_bound(outgoing.begin(), outgoing.end(), t.name,
                          [](const Outgoing& s, const std::string& name) { return s.name < name; });
    const int64_t bytes = stored_bytes(t.dtype, t.dims);
    const void* host = tensor.data;
    if (tensor.where != Outgoing::Where::kHost) {
      staging.resize(static_cast<size_t>(bytes));
      if (tensor.where == Outgoing::Where::kDevice) queue.copy_to_host(staging.data(), tensor.data, bytes);
      if (tensor.where == Outgoing::Where::kOnRanks) fetch(tensor.name, staging.data());
      host = staging.data();
    }
    writer.write_next(host);
    manifest->tensors.push_back(
        {t.name, tensor.dtype, t.dims, shard, XXH3_64bits(host, static_cast<size_t>(bytes))});
  }
  writer.finish();
  manifest->shards.push_back({file, writer.file_bytes(), writer.header_hash()});
}

// Manifest and shards without the tensors' hashes: enough to count a folder among those to keep.
bool looks_whole(const std::string& path) {
  try {
    CheckpointReader{path};
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

CheckpointStore::CheckpointStore(const std::string& run_dir, StoreOptions options)
    : dir_(run_dir + "/checkpoints"), options_(std::move(options)) {
  make_directory(dir_);
}

void write_checkpoint(Queue& queue, const std::string& folder, const std::vector<NamedTensor>& tensors,
                      const RunState& state, const TensorParts& parts, const FetchWhole& fetch,
                      const StoreOptions& options) {
  const std::vector<HostArray> rollout = rollout_to_arrays(state.rollout);
  const std::vector<Outgoing> outgoing = outgoing_tensors(queue, tensors, rollout, parts);
  queue.synchronize();
  Manifest manifest;
  manifest.program_version = FP4T_VERSION;
  manifest.state = state;
  for (const auto& range : cut_shards(outgoing, options.shard_bytes)) {
    write_shard(queue, folder, outgoing, range, fetch, options.hook, &manifest);
  }
  std::sort(manifest.tensors.begin(), manifest.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  write_file(folder + "/telemetry.json", state.telemetry_json, options.hook);
  write_file(folder + "/manifest.json", manifest_text(manifest), options.hook);
  sync_directory(folder, options.hook);
}

void CheckpointStore::put_in_place(const std::string& from, const std::string& name) {
  const std::string final_path = dir_ + "/" + name;
  const std::string replaced = final_path + kReplaced;
  // A folder of this name exists after a resume from an older checkpoint. It steps aside until the new one
  // stands; clean_leftovers puts it back if the process dies in between.
  const bool replaces = path_exists(final_path);
  if (replaces) {
    remove_path(replaced, options_.hook);
    rename_path(final_path, replaced, options_.hook);
  }
  rename_path(from, final_path, options_.hook);
  sync_directory(dir_, options_.hook);

  const std::string latest = dir_ + "/latest";
  const std::string temporary = latest + kTemporary + std::to_string(::getpid());
  write_file(temporary, name + "\n", options_.hook);
  rename_path(temporary, latest, options_.hook);
  sync_directory(dir_, options_.hook);
  if (replaces) remove_path(replaced, options_.hook);
}

std::string CheckpointStore::save(Queue& queue, const std::vector<NamedTensor>& tensors,
                                  const RunState& state, int64_t keep, const TensorParts& parts,
                                  const FetchWhole& fetch) {
  FP4T_CHECK(keep >= 1, "keep ", keep);
  const std::string name = checkpoint_name({state.stage, state.step, state.update});
  const std::string temporary = dir_ + "/" + name + kTemporary + std::to_string(::getpid());
  try {
    remove_path(temporary, options_.hook);
    make_directory(temporary);
    write_checkpoint(queue, temporary, tensors, state, parts, fetch, options_);
    try {
      put_in_place(temporary, name);
      remove_older(name, keep);
    } catch (const MissingInputError& error) {  // a folder that cannot be looked into
      throw SaveError(error.what());
    }
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report
    fs::remove_all(temporary, ignored);
    throw;
  }
  return dir_ + "/" + name;
}

void CheckpointStore::remove_older(const std::string& name, int64_t keep) {
  // Numbers beyond the new one's are of another course of the run: they neither count nor go.
  const CheckpointNumber saved = *checkpoint_number(name);
  std::vector<CheckpointNumber> older;
  for (const CheckpointNumber& n : list_checkpoints(dir_)) {
    if (n < saved) older.push_back(n);
  }
  const auto kept = static_cast<size_t>(keep - 1);
  if (older.size() <= kept) return;
  try {
    read_checkpoint_info(dir_ + "/" + name, true);
  } catch (const Error& error) {
    throw SaveError("the checkpoint just written cannot be read back, older ones stay: " +
                    std::string(error.what()));
  }
  size_t standing = 0;
  for (const CheckpointNumber& n : older) {
    const std::string path = dir_ + "/" + checkpoint_name(n);
    if (standing < kept) {
      standing += looks_whole(path);
      continue;
    }
    // Renamed first: a half-removed folder must not look like a damaged checkpoint.
    const std::string temporary = path + kTemporary + std::to_string(::getpid());
    rename_path(path, temporary, options_.hook);
    remove_path(temporary, options_.hook);
  }
}

void CheckpointStore::clean_leftovers(std::vector<std::string>* notes) {
  for (const std::string& name : names_in(dir_)) {
    const std::string path = dir_ + "/" + name;
    if (name.find(kTemporary) != std::string::npos) {
      remove_path(path, options_.hook);
      notes->push_back("removed '" + printable(path) + "', left by a save that did not finish");
    } else if (ends_with(name, kReplaced)) {
      const std::string original = path.substr(0, path.size() - std::string(kReplaced).size());
      if (path_exists(original)) {
        remove_path(path, options_.hook);
      } else {
        rename_path(path, original, options_.hook);
        notes->push_back("restored '" + printable(original) + "' after a save that did not finish");
      }
    }
  }
}

std::string CheckpointStore::newest(std::vector<std::string>* notes,
                                    const std::function<void(const CheckpointInfo&)>& check) {
  std::vector<CheckpointNumber> candidates;
  try {
    clean_leftovers(notes);
    candidates = checkpoints_to_try(dir_);
  } catch (const MissingInputError& error) {
    throw NoCheckpointError(error.what());  // not the same as none
  }
  std::string failures;
  for (const CheckpointNumber& number : candidates) {
    const std::string path = dir_ + "/" + checkpoint_name(number);
    try {
      const CheckpointInfo info = read_checkpoint_info(path, true);
      if (check) check(info);
      notes->insert(notes->end(), info.notes.begin(), info.notes.end());
      return path;
    } catch (const Error& error) {
      notes->push_back("checkpoint '" + printable(path) + "' is passed over: " + error.what());
      failures += "\n  " + std::string(error.what());
    }
  }
  if (candidates.empty()) return "";
  throw NoCheckpointError(detail::concat("none of the ", candidates.size(), " checkpoints in '",
                                         printable(dir_), "' can be read:", failures));
}

std::string CheckpointStore::space_warning(int64_t checkpoint_bytes, int64_t keep) const {
  std::error_code error;
  const fs::space_info space = fs::space(dir_, error);
  if (error) return "";
  const auto present = static_cast<int64_t>(list_checkpoints(dir_).size());
  const int64_t to_come = std::max<int64_t>(keep + 1 - present, 1);
  const auto free_bytes = static_cast<int64_t>(space.available);
  if (free_bytes / to_come >= checkpoint_bytes) return "";
  return detail::concat("'", printable(dir_), "' has ", free_bytes, " bytes free; ", to_come,
                        " further checkpoints of ", checkpoint_bytes, " bytes may not fit");
}

}  // namespace fp4t
