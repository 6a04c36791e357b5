// TensorBoard event files, encoded by hand: TFRecord frames (u64 length, masked CRC-32C of it, payload,
// masked CRC-32C of that) around the protobuf message Event{wall_time = 1, step = 2, file_version = 3,
// summary = 5 {value = 1 {tag = 1, simple_value = 2}}}. A text is a value {tag, tensor = 8 {dtype = 1 (7,
// string), tensor_shape = 2 {dim = 2 {size = 1}}, string_val = 8}, metadata = 9 {plugin_data = 1 {plugin_name
// = 1
// ("text")}, data_class = 4 (2, tensor)}}.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fp4t {

class TensorBoardFile {
 public:
  // Creates <dir>/events.out.tfevents.<seconds>.<pid>.fp4train; one file a process.
  // Throws SaveError, as writing does.
  explicit TensorBoardFile(const std::string& dir);

  // Texts are shown as they are, line by line: TensorBoard would read them as Markdown otherwise.
  void write(int64_t step, double wall_time, const std::vector<std::pair<std::string, double>>& scalars,
             const std::vector<std::pair<std::string, std::string>>& texts = {});

 private:
  void record(const std::string& payload);
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

// CRC-32C (Castagnoli) and TFRecord's mask of it.
uint32_t crc32c(const void* data, size_t size);
uint32_t masked_crc32c(const void* data, size_t size);

}  // namespace fp4t
