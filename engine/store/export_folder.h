// A whole exported folder: config.json, generation_config.json, weights in one file or in several with an
// index, and the tokenizer's files. Written beside its place and renamed there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/store/export_layout.h"

namespace fp4t {

// Type of weights that hold numbers. kExact: BF16 where it holds every value, else F32; in layouts with codes
// one by one, and what the trainer multiplies in BF16 is BF16.
enum class NumberType : uint8_t { kExact, kF32, kBf16 };

struct ExportOptions {
  ExportLayout layout = ExportLayout::kHf;
  NumberType numbers = NumberType::kExact;
  int64_t shard_bytes = int64_t{4} << 30;  // a file is closed before it would grow beyond this
  std::string source;                      // folder to copy tokenizer and generation files from; "": none
  int64_t begin_token = -1;                // where the source names none; -1: none
  int64_t end_token = -1;                  // likewise
  bool replace = false;                    // an exported folder that is there already
  SaveHook hook;                           // for tests
};

struct ExportReport {
  int64_t tensors = 0, files = 0, bytes = 0;
  int64_t rounded = 0;               // values that BF16 does not hold
  FileType number = FileType::kF32;  // what most numbers are: config.json's dtype
  std::vector<std::string> copied;   // names of files
};

// Throws RecipeError when `to` exists (and is not to be replaced, or is no exported folder), SaveError.
ExportReport write_export(ExportModel& model, const std::string& to, const ExportOptions& options);

}  // namespace fp4t
