// Files as the store needs them: output that is on disk when it says so, input that is bounded, and the
// step at which a test may stop a save. Every failure names the path and the system's reason.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fp4t {

// Called before each step of a save that touches the disk ("write tensors-00001.safetensors"). Tests kill
// the process in it or throw from it; empty in a run.
using SaveHook = std::function<void(const std::string& step)>;

// A new file, written in order. Throws SaveError; the destructor closes without syncing.
class OutputFile {
 public:
  OutputFile(const std::string& path, const SaveHook& hook);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, int64_t bytes);
  // fsync and close.
  void finish();

 private:
  void close_quietly();
  std::string path_;
  SaveHook hook_;
  int fd_ = -1;
};

// A regular file opened for reading at any offset. Throws MissingInputError when it is not there,
// BadDataError when it is no regular file or shorter than asked for.
class InputFile {
 public:
  explicit InputFile(const std::string& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  int64_t size() const { return size_; }
  void read_at(int64_t offset, int64_t bytes, void* out) const;

 private:
  std::string path_;
  int64_t size_ = 0;
  int fd_ = -1;
};

// The whole of a small file; BadDataError beyond `max_bytes`.
std::string read_small_file(const std::string& path, int64_t max_bytes);

// Both throw MissingInputError, with the system's reason, when that cannot be told.
bool path_exists(const std::string& path);
std::vector<std::string> names_in(const std::string& folder);  // sorted; none when it is not there

// The following throw SaveError.
void write_file(const std::string& path, const std::string& text, const SaveHook& hook);
void make_directory(const std::string& path);  // with its parents
void sync_directory(const std::string& path, const SaveHook& hook);
void rename_path(const std::string& from, const std::string& to, const SaveHook& hook);
// A file or a whole folder; nothing happens when it is not there.
void remove_path(const std::string& path, const SaveHook& hook);

}  // namespace fp4t
