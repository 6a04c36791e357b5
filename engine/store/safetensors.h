// safetensors files: a bounded reader that survives hostile input, and a writer.
// Layout: u64 little-endian header length, JSON header (dtype, shape, data_offsets), data.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/store/files.h"
#include "kernels/base/tensor.h"

namespace fp4t {

// Type of an element in a file: one that tensors in memory have, or one that only files have.
class FileType {
 public:
  enum Kind : uint8_t { kF32, kBf16, kF64, kI32, kI64, kU8, kF16, kF8E4m3 };

  constexpr FileType(Kind kind) : kind_(kind) {}
  constexpr FileType(DType dtype) : kind_(static_cast<Kind>(dtype)) {}
  constexpr Kind kind() const { return kind_; }
  constexpr bool operator==(const FileType&) const = default;
  int64_t bytes() const;
  const char* name() const;                          // "F32", "F8_E4M3"
  static FileType from_name(std::string_view name);  // throws BadDataError when unknown

 private:
  Kind kind_;
};
static_assert(FileType(DType::kF32) == FileType::kF32 && FileType(DType::kU8) == FileType::kU8);

struct StoredTensor {
  std::string name;
  FileType dtype;
  std::vector<int64_t> dims;
  int64_t begin, end;  // bytes, from the start of the data section
  int64_t bytes() const { return end - begin; }
};

// Throws MissingInputError, BadDataError (with file and tensor) for anything irregular: header beyond the
// file or 64 MiB, bad JSON, duplicate names, unknown dtypes, offsets that overlap, leave gaps or do not
// match the shape, bytes that belong to no tensor.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // in the order of their data
  const StoredTensor& find(const std::string& name) const;               // throws BadDataError
  bool contains(const std::string& name) const { return index_.count(name) != 0; }
  // Bytes of one tensor.
  std::vector<uint8_t> read(const StoredTensor& tensor) const;
  void read_into(const StoredTensor& tensor, void* host) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }
  int64_t file_bytes() const { return file_->size(); }
  // XXH3 of everything before the data section.
  uint64_t header_hash() const { return header_hash_; }

 private:
  void check_layout(int64_t data_bytes);

  std::string path_;
  std::shared_ptr<const InputFile> file_;
  int64_t data_begin_ = 0;
  uint64_t header_hash_ = 0;
  std::vector<StoredTensor> tensors_;
  std::unordered_map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

struct TensorToStore {
  std::string name;
  FileType dtype;
  std::vector<int64_t> dims;
  const void* data;  // host memory
};

// Writes one file tensor by tensor, so that device tensors pass through one staging buffer. The header is
// padded to 8 bytes and wide elements come first, so every tensor is aligned to its element.
class SafetensorsWriter {
 public:
  // `data` of the tensors is not used here. Throws SaveError; InternalError for duplicate names.
  SafetensorsWriter(const std::string& path, std::vector<TensorToStore> tensors,
                    const std::map<std::string, std::string>& metadata, const SaveHook& hook);
  // The order in which write_next expects the tensors.
  const std::vector<TensorToStore>& order() const { return tensors_; }
  void write_next(const void* host);
  // Syncs; all tensors must have been written.
  void finish();
  uint64_t header_hash() const { return header_hash_; }
  int64_t file_bytes() const { return file_bytes_; }

 private:
  std::vector<TensorToStore> tensors_;
  OutputFile file_;
  size_t next_ = 0;
  uint64_t header_hash_ = 0;
  int64_t file_bytes_ = 0;
};

// Writes and fsyncs. Throws SaveError.
void write_safetensors(const std::string& path, const std::vector<TensorToStore>& tensors,
                       const std::map<std::string, std::string>& metadata);

// Bytes of a tensor; throws InternalError for shapes that do not fit.
int64_t stored_bytes(FileType dtype, const std::vector<int64_t>& dims);
// "[2, 3]"
std::string dims_text(const std::vector<int64_t>& dims);
std::vector<int64_t> dims_of(const Shape& shape);

}  // namespace fp4t
