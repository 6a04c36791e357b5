// manifest.json: what a checkpoint holds, written last. Its last line is the XXH3 of all text before it,
// so that any changed byte shows. Numbers are exact: finite doubles in shortest round-trip form, others
// as {"bits": hex}; texts that are not UTF-8 as {"hex": ...}.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/store/checkpoint.h"
#include "kernels/base/dtype.h"

namespace fp4t {

inline constexpr int64_t kCheckpointFormatVersion = 1;
inline constexpr const char* kRolloutPrefix = "rollout.";

struct ShardEntry {
  std::string file;  // "tensors-00001.safetensors"
  int64_t bytes = 0;
  uint64_t header_hash = 0;
};

struct TensorEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;
  int64_t shard = 0;  // index
  uint64_t hash = 0;  // XXH3 of the bytes
};

struct Manifest {
  std::string program_version;
  RunState state;  // without rollout and telemetry
  std::vector<ShardEntry> shards;
  std::vector<TensorEntry> tensors;  // sorted by name
};

std::string shard_file_name(int64_t idx);
std::string hex16(uint64_t value);

// XXH3 over tensors (name, type, shape, hash) and state, without the recipe's text and the shards.
uint64_t content_hash(const Manifest& manifest);

std::string manifest_text(const Manifest& manifest);
// `body` is the text up to the hash's line.
std::string with_manifest_hash(std::string body);
// Throws BadDataError; `path` is for messages.
Manifest parse_manifest(const std::string& path, const std::string& text);

}  // namespace fp4t
