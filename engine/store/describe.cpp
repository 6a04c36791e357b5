// The text of `fp4train inspect`.
#include <iomanip>
#include <limits>
#include <sstream>

#include "engine/store/checkpoint_read.h"
#include "kernels/base/text.h"

namespace fp4t {

std::string describe_checkpoint(const std::string& path, bool verify) {
  const CheckpointReader reader(path);
  if (verify) reader.verify();
  const Manifest& m = reader.manifest();
  std::vector<std::string> notes;
  const RunState state = reader.state(&notes);

  std::ostringstream out;
  out << std::setprecision(std::numeric_limits<double>::max_digits10);
  out << "checkpoint " << printable(path) << "\n"
      << "format " << kCheckpointFormatVersion << ", written by fp4train " << printable(m.program_version)
      << "\n"
      << "stage " << state.stage << ", step " << state.step << ", update " << state.update << "\n"
      << "updates attempted " << state.attempted_updates << ", applied " << state.applied_updates << "\n"
      << "next sample " << state.next_sample << ", metrics lines " << state.metrics_lines << "\n"
      << "precision hash " << printable(state.precision_hash) << "\n";
  if (state.rollout.size() > 0) out << "rollout in progress: " << state.rollout.size() << " completions\n";
  out << "counters: " << state.counters.size() << "\n";
  for (const auto& [name, value] : state.counters) out << "  " << printable(name) << " = " << value << "\n";
  out << "texts: " << state.texts.size() << "\n";
  for (const auto& [name, value] : state.texts)
    out << "  " << printable(name) << " = " << printable(value) << "\n";
  out << "lineage: " << state.lineage.size() << "\n";
  for (const std::string& line : state.lineage) out << "  " << printable(line) << "\n";

  int64_t bytes = 0;
  size_t width = 0;
  for (const TensorEntry& t : m.tensors) {
    bytes += stored_bytes(t.dtype, t.dims);
    width = std::max(width, printable(t.name).size());
  }
  out << "tensors: " << m.tensors.size() << " in " << m.shards.size() << " shards, " << bytes << " bytes\n";
  for (const TensorEntry& t : m.tensors) {
    out << "  " << std::left << std::setw(static_cast<int>(width)) << printable(t.name) << "  "
        << std::setw(4) << safetensors_name(t.dtype) << "  " << hex16(t.hash) << "  " << dims_text(t.dims)
        << "\n";
  }
  for (const std::string& note : notes) out << "note: " << printable_lines(note) << "\n";
  if (verify) out << "all hashes verified\n";
  out << "content hash: " << hex16(content_hash(m)) << "\n";
  return out.str();
}

}  // namespace fp4t
