// A file in memory, read where it is looked at.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

#include "kernels/base/check.h"

namespace fp4t {

class MappedFile {
 public:
  // Throws MissingInputError when it cannot be opened, BadDataError when it is no regular file.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;

  const std::string& path() const { return path_; }
  std::string_view bytes() const { return {data_, size_}; }
  int64_t size() const { return static_cast<int64_t>(size_); }
  // The value at a byte, aligned or not, in this machine's (little-endian) order.
  template <class T>
  T at(int64_t byte) const {
    FP4T_CHECK(byte >= 0 && byte + static_cast<int64_t>(sizeof(T)) <= size(), path_, " at ", byte);
    T value;
    std::memcpy(&value, data_ + byte, sizeof(T));
    return value;
  }

 private:
  std::string path_;
  const char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace fp4t
