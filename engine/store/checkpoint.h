// Checkpoints (DESIGN.md section 8): logical tensors in safetensors shards with an XXH3 hash each, a JSON
// manifest written last, the directory renamed into place, then `latest` replaced. Layout of a run folder:
//   <dir>/checkpoints/step_<stage>_<step>_<update>/{manifest.json, tensors-00001.safetensors, telemetry.json}
//   <dir>/checkpoints/latest        (text: the folder's name)
// Equal content gives equal bytes of every file but telemetry.json: no times, process ids or paths.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/store/files.h"
#include "engine/store/parts.h"
#include "engine/tokens/rollout.h"
#include "kernels/base/queue.h"
#include "kernels/base/tensor.h"

namespace fp4t {

// Everything of a run that is not a tensor. `telemetry_json` stands outside every hash; `recipe_yaml` is
// protected by the manifest's hash, but left out of the content hash, since it names output folders.
struct RunState {
  int64_t stage = 0;                         // index in the recipe
  int64_t step = 0;                          // completed steps of the stage
  int64_t update = 0;                        // RL: completed updates of step `step` (0: between steps)
  int64_t attempted_updates = 0;             // of the run
  int64_t applied_updates = 0;               // of the optimizer's state
  int64_t next_sample = 0;                   // global sample counter of the run
  int64_t metrics_lines = 0;                 // lines of metrics.jsonl that belong to this state
  std::map<std::string, double> counters;    // monitors and summary figures, by name
  std::map<std::string, std::string> texts;  // further state as text (resolved spans, fingerprints)
  std::string recipe_yaml;                   // resolved
  std::string precision_hash;
  std::vector<std::string> lineage;   // accepted changes: "step ...: path: old -> new"
  Rollout rollout;                    // RL with update > 0: the rollout in progress
  std::string telemetry_json = "{}";  // times, restarts: outside hash and equality
};

struct CheckpointInfo {
  std::string path;
  RunState state;
  std::string content_hash;               // 16 hex digits over all tensors and counters, whatever the layout
  std::vector<std::string> tensor_names;  // sorted; without the rollout's, which are in `state`
  std::vector<std::string> notes;         // what was amiss without harm to the state (telemetry)
};

struct StoreOptions {
  int64_t shard_bytes = int64_t{1} << 30;  // a shard is closed before it would grow beyond this
  SaveHook hook;                           // for tests
};

class CheckpointStore {
 public:
  // `run_dir` is created when absent. Throws SaveError.
  explicit CheckpointStore(const std::string& run_dir, StoreOptions options = {});

  // Writes a complete checkpoint and removes older ones beyond `keep` once the new one is safe; returns
  // its folder. Damaged ones do not count as kept: those behind the last kept one go, the others stay. Throws
  // SaveError; what was there before stays intact. Names that begin with "rollout." are the state's own. A
  // full file system must show as an error of write(): the process ignores SIGXFSZ. Of the tensors named in
  // `parts` this process holds a part; `fetch` brings the whole.
  std::string save(Queue& queue, const std::vector<NamedTensor>& tensors, const RunState& state, int64_t keep,
                   const TensorParts& parts = {}, const FetchWhole& fetch = {});

  // Newest complete and verified checkpoint, damaged ones reported in `notes`; "" when there is none at all.
  // Throws NoCheckpointError when there are some and none is readable, or when that cannot be told. Removes
  // leftovers of saves. What `check` throws about a state counts as damage.
  std::string newest(std::vector<std::string>* notes,
                     const std::function<void(const CheckpointInfo&)>& check = {});

  // What to tell the user at the start when `keep` checkpoints and one in the making may not fit on the
  // disk; "" when they fit.
  std::string space_warning(int64_t checkpoint_bytes, int64_t keep) const;

 private:
  void put_in_place(const std::string& from, const std::string& name);
  void remove_older(const std::string& name, int64_t keep);
  void clean_leftovers(std::vector<std::string>* notes);

  std::string dir_;
  StoreOptions options_;
};

// Writes a complete checkpoint into a folder that is there, outside any run; `fetch` as in save. Throws
// SaveError.
void write_checkpoint(Queue& queue, const std::string& folder, const std::vector<NamedTensor>& tensors,
                      const RunState& state, const TensorParts& parts, const FetchWhole& fetch,
                      const StoreOptions& options);

// Reads counters and verifies; throws BadDataError naming file and tensor.
CheckpointInfo read_checkpoint_info(const std::string& path, bool verify_hashes);

// Fills the given tensors by name, hashes checked; every name, type and shape must match, none may be
// missing or left over (except names that start with one of `optional_prefixes`). Tensors named in `parts`
// are filled from their place in the stored one.
void load_tensors(Queue& queue, const std::string& path, const std::vector<NamedTensor>& tensors,
                  const std::vector<std::string>& optional_prefixes, const TensorParts& parts = {});

// What `fp4train inspect` prints: tensors (name, type, shape, hash), counters, lineage; the last line is
// "content hash: HEX". `verify` recomputes every hash and throws BadDataError naming file and tensor.
std::string describe_checkpoint(const std::string& path, bool verify);

// The checkpoint folder that `path` means: itself, or the one of a run folder or of its `checkpoints` that
// training would try first: what `latest` names, else the newest before it, else the newest.
// Throws MissingInputError.
std::string find_checkpoint(const std::string& path);

// Held while a process works in a run folder; a second one is refused (RecipeError naming its pid) when the
// first still holds it after a few seconds. A folder that was made for it, and in which nothing was written,
// goes with it: a start that is refused leaves nothing behind.
class RunLock {
 public:
  explicit RunLock(const std::string& run_dir);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  void open_and_lock(const std::string& path);
  void leave_no_trace() const;

  std::string dir_;
  std::vector<std::string> made_;  // folders that were not there before, the innermost first
  int fd_ = -1;
};

}  // namespace fp4t
