// XXH3-64 as 16 hex digits: the form in which recipes and checkpoints name contents.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace fp4t {

std::string xxh3_hex(std::string_view bytes);

// The same of bytes that come piece by piece.
class Xxh3Stream {
 public:
  Xxh3Stream();
  void add(const void* data, size_t size);
  std::string hex() const;

 private:
  std::shared_ptr<void> state_;
};

}  // namespace fp4t
