#include "engine/metrics/tensorboard.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "engine/metrics/metrics.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = c & 1 ? 0x82F63B78u ^ (c >> 1) : c >> 1;
    table[i] = c;
  }
  return table;
}
constexpr auto kTable = make_table();

template <class T>
std::string raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

std::string varint(uint64_t v) {
  std::string out;
  while (v >= 0x80) {
    out += static_cast<char>(static_cast<uint8_t>(v | 0x80));
    v >>= 7;
  }
  return out + static_cast<char>(static_cast<uint8_t>(v));
}

// Protobuf fields: key = number << 3 | wire type (0 varint, 1 fixed64, 2 bytes, 5 fixed32).
std::string bytes_field(int number, const std::string& value) {
  return varint(static_cast<uint64_t>(number) << 3 | 2) + varint(value.size()) + value;
}

std::string varint_field(int number, uint64_t value) {
  return varint(static_cast<uint64_t>(number) << 3) + varint(value);
}

// Lines indented by four are code to Markdown: every character stands for itself.
std::string as_code(const std::string& text) {
  std::string out = "    ";
  for (const char c : text) {
    out += c;
    if (c == '\n') out += "    ";
  }
  return out;
}

std::string text_tensor(const std::string& text) {
  constexpr uint64_t kString = 7, kDataClassTensor = 2;
  const std::string shape = bytes_field(2, bytes_field(2, varint_field(1, 1)));
  const std::string tensor = varint_field(1, kString) + shape + bytes_field(8, as_code(text));
  const std::string metadata = bytes_field(1, bytes_field(1, "text")) + varint_field(4, kDataClassTensor);
  return bytes_field(8, tensor) + bytes_field(9, metadata);
}

}  // namespace

uint32_t crc32c(const void* data, size_t size) {
  const auto* p = static_cast<const uint8_t*>(data);
  uint32_t c = ~0u;
  for (size_t i = 0; i < size; ++i) c = kTable[(c ^ p[i]) & 0xFF] ^ (c >> 8);
  return ~c;
}

uint32_t masked_crc32c(const void* data, size_t size) {
  const uint32_t c = crc32c(data, size);
  return ((c >> 15) | (c << 17)) + 0xA282EAD8u;
}

TensorBoardFile::TensorBoardFile(const std::string& dir) : file_(nullptr, std::fclose) {
  make_run_folder(dir);
  const auto now = static_cast<double>(std::time(nullptr));
  path_ =
      detail::concat(dir, "/events.out.tfevents.", static_cast<int64_t>(now), ".", ::getpid(), ".fp4train");
  file_.reset(std::fopen(path_.c_str(), "wb"));
  if (!file_) throw SaveError(detail::concat("cannot write ", printable(path_), ": ", std::strerror(errno)));
  record(varint(1 << 3 | 1) + raw(now) + bytes_field(3, "brain.Event:2"));
}

void TensorBoardFile::record(const std::string& payload) {
  const uint64_t length = payload.size();
  const std::string frame = raw(length) + raw(masked_crc32c(&length, sizeof(length))) + payload +
                            raw(masked_crc32c(payload.data(), payload.size()));
  const bool good = std::fwrite(frame.data(), 1, frame.size(), file_.get()) == frame.size() &&
                    std::fflush(file_.get()) == 0;
  if (!good) throw SaveError(detail::concat("cannot write ", printable(path_), ": ", std::strerror(errno)));
}

void TensorBoardFile::write(int64_t step, double wall_time,
                            const std::vector<std::pair<std::string, double>>& scalars,
                            const std::vector<std::pair<std::string, std::string>>& texts) {
  std::string summary;
  for (const auto& [tag, value] : scalars) {
    summary += bytes_field(1, bytes_field(1, tag) + varint(2 << 3 | 5) + raw(static_cast<float>(value)));
  }
  for (const auto& [tag, text] : texts) {
    summary += bytes_field(1, bytes_field(1, tag) + text_tensor(text));
  }
  record(varint(1 << 3 | 1) + raw(wall_time) + varint(2 << 3) + varint(static_cast<uint64_t>(step)) +
         bytes_field(5, summary));
}

}  // namespace fp4t
