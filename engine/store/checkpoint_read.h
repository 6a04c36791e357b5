// Names of checkpoints, and the reader behind read_checkpoint_info, load_tensors and describe_checkpoint.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/store/manifest.h"
#include "engine/store/rollout_arrays.h"
#include "engine/store/safetensors.h"

namespace fp4t {

struct CheckpointNumber {
  int64_t stage, step, update;
  auto operator<=>(const CheckpointNumber&) const = default;
};
std::string checkpoint_name(const CheckpointNumber& number);                 // "step_0_200_0"
std::optional<CheckpointNumber> checkpoint_number(const std::string& name);  // exactly such names
// Largest first; none when the folder is not there. Throws MissingInputError when it cannot be listed.
std::vector<CheckpointNumber> list_checkpoints(const std::string& dir);
// What the file `latest` names, when it names a checkpoint.
std::optional<CheckpointNumber> latest_checkpoint(const std::string& dir);
// `latest` first, then what came before it, then what lies beyond it; newest first each.
std::vector<CheckpointNumber> checkpoints_to_try(const std::string& dir);

// An opened checkpoint: the manifest and the shards agree in names, types, shapes and headers. Throws
// BadDataError naming file and tensor.
class CheckpointReader {
 public:
  explicit CheckpointReader(const std::string& path);
  const Manifest& manifest() const { return manifest_; }
  // Reads one tensor and checks its hash.
  std::vector<uint8_t> read(const TensorEntry& tensor) const;
  // Checks every tensor's hash.
  void verify() const;
  // The state with rollout and telemetry.
  RunState state(std::vector<std::string>* notes) const;

 private:
  void check_shards() const;

  std::string path_;
  Manifest manifest_;
  std::vector<std::unique_ptr<SafetensorsFile>> shards_;
};

}  // namespace fp4t
