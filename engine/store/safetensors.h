// safetensors files: a bounded reader that survives hostile input, and a writer.
// Layout: u64 little-endian header length, JSON header (dtype, shape, data_offsets), data.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/base/tensor.h"

namespace fp4t {

struct StoredTensor {
  std::string name;
  DType dtype;
  std::vector<int64_t> dims;
  int64_t begin, end;  // bytes, from the start of the data section
};

// Throws MissingInputError, BadDataError (with file and tensor) for anything irregular: header beyond the
// file or 64 MiB, bad JSON, unknown dtypes, offsets that overlap, leave gaps or do not match the shape.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const StoredTensor& find(const std::string& name) const;  // throws BadDataError
  bool contains(const std::string& name) const;
  // Bytes of one tensor.
  std::vector<uint8_t> read(const StoredTensor& tensor) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int64_t data_begin_ = 0;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

struct TensorToStore {
  std::string name;
  DType dtype;
  std::vector<int64_t> dims;
  const void* data;  // host memory
};

// Writes and fsyncs. Throws SaveError.
void write_safetensors(const std::string& path, const std::vector<TensorToStore>& tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace fp4t
