// A machine that a plan is made for without being there (`fp4train plan --machine`): sizes, peaks, links, and
// the share of its peaks that this program's ops reach. Every number says where it comes from. The files are
// configs/machines/*.yaml, read as strictly as recipes; the program carries their texts, so that a name is
// enough. GB and TFLOP/s are decimal, GiB is binary; a link's rate is one rank's, in one direction.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/recipe/fields.h"
#include "kernels/base/queue.h"

namespace fp4t {

// A number and where it comes from: a section of scripts/bench/RESULTS.md, a data sheet, or an assumption,
// named as such.
struct Figure {
  double value = 0;
  std::string source;
};

// What an op reaches: of products, attention and the router a share of the peak of their format; of the rest
// a share of the memory rate.
enum class Rate : uint8_t {
  kDense,         // products of a matrix
  kGroupedFprop,  // products of experts
  kGroupedDgrad,
  kGroupedWgrad,
  kCodedProducts,  // any product on block-scaled tensor cores
  kAttentionForward,
  kAttentionBackward,
  kRouter,  // logits and their gradients, of the FP32 peak
  kElementwise,
  kNormForward,
  kNormBackward,
  kRotary,
  kPermute,
  kCombine,
  kLoss,
  kAdamw,
  kCachedAttention,
  kFewRows,        // products of so few rows that reading BF16 weights is their cost
  kFewCodedRows,   // the same with NVFP4 weights that the core decodes, up to 4 rows an expert
  kSomeCodedRows,  // beyond
  kQuantiseRow,
  kQuantiseColumn,
  kQuantiseBoth,    // row and column in one reading
  kQuantiseGroups,  // the same of experts' rows
  kQuantiseWeight,  // 16x16, with its transpose
  kQuantiseFourOverSix,
  kQuantiseMsEden,
  kQuantiseMxfp8,
  kDecodeCodes,  // codes to BF16 values, for products without tensor cores of their format
};
inline constexpr size_t kNumRates = static_cast<size_t>(Rate::kDecodeCodes) + 1;
const char* name_of(Rate rate);  // its key

struct LinkSpec {
  Figure gb_s, latency_us;
};

struct MachineSpec {
  std::string name;
  std::string backend = "cuda";       // cuda, cpu
  int64_t arch = 0;                   // compute capability x 10
  int64_t ranks_per_node = 1;         // of one host
  int64_t fast_domain = 1;            // consecutive ranks joined by the fast link
  int64_t threads = 1;                // of a CPU
  Figure memory_gib, memory_gb_s;     // of a rank; read + written by a copy
  Figure bf16_tflops, fp32_tflops;    // dense
  Figure mxfp8_tflops, nvfp4_tflops;  // 0: no such tensor core, codes are decoded to BF16
  // What products and attention keep of their speed alone when they follow one another at the device's limit
  // of power; products of decoded codes, which need less, keep all (KERNELS.md section 0).
  Figure sustained;
  Figure op_us;                           // what an op takes besides its work, where nothing hides it
  std::array<Figure, kNumRates> rates{};  // by Rate
  LinkSpec fast, slow;

  bool is_gpu() const { return backend == "cuda"; }
  bool has_coded_products() const { return mxfp8_tflops.value > 0 || nvfp4_tflops.value > 0; }
  // FLOP/s of products of this format; 0 where they are computed in BF16.
  double peak(Format format) const;
  double share(Rate rate) const { return rates[static_cast<size_t>(rate)].value; }
  double memory_bytes_s() const { return memory_gb_s.value * 1e9; }
};

void visit_machine(FieldVisitor& v, MachineSpec& s);

// Names that the program knows: the files of configs/machines without their ending.
std::vector<std::string> machine_names();
// By name, or from a file, which a slash or a dot in `name_or_path` says. Throws RecipeError with all
// problems at once, MissingInputError when the file is not there.
MachineSpec load_machine(const std::string& name_or_path);
MachineSpec parse_machine(const std::string& text, const std::string& file_name);

// As a plan sees it.
Machine machine_of(const MachineSpec& spec);

}  // namespace fp4t
