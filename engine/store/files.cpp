#include "engine/store/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// Large enough to be fast, small enough that a killed save leaves files cut anywhere.
constexpr int64_t kWriteBytes = int64_t{4} << 20;

[[noreturn]] void fail_save(const std::string& what, const std::string& path, int error) {
  throw SaveError(detail::concat("cannot ", what, " '", printable(path), "': ", std::strerror(error)));
}

void announce(const SaveHook& hook, const std::string& verb, const std::string& path) {
  if (hook) hook(verb + " " + std::filesystem::path(path).filename().string());
}

}  // namespace

OutputFile::OutputFile(const std::string& path, const SaveHook& hook) : path_(path), hook_(hook) {
  announce(hook_, "create", path_);
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail_save("create", path_, errno);
}

OutputFile::~OutputFile() { close_quietly(); }

void OutputFile::close_quietly() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void OutputFile::write(const void* data, int64_t bytes) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    announce(hook_, "write", path_);
    const ssize_t n = ::write(fd_, p, static_cast<size_t>(std::min(bytes, kWriteBytes)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_save("write", path_, errno);
    if (n == 0) fail_save("write", path_, ENOSPC);
    p += n;
    bytes -= n;
  }
}

void OutputFile::finish() {
  announce(hook_, "sync", path_);
  if (::fsync(fd_) != 0) fail_save("sync", path_, errno);
  // Some file systems report a failed write only here.
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0) fail_save("close", path_, errno);
}

InputFile::InputFile(const std::string& path) : path_(path) {
  // Non-blocking: a FIFO in a file's place must not hang the run.
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) {
    throw MissingInputError(detail::concat("cannot open '", printable(path), "': ", std::strerror(errno)));
  }
  struct stat info {};
  const bool regular = ::fstat(fd_, &info) == 0 && S_ISREG(info.st_mode);
  if (!regular) {
    ::close(fd_);
    throw BadDataError(detail::concat("'", printable(path), "' is not a regular file"));
  }
  size_ = info.st_size;
}

InputFile::~InputFile() { ::close(fd_); }

void InputFile::read_at(int64_t offset, int64_t bytes, void* out) const {
  char* p = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd_, p, static_cast<size_t>(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      throw BadDataError(detail::concat("cannot read '", printable(path_), "': ", std::strerror(errno)));
    if (n == 0) {
      throw BadDataError(detail::concat("'", printable(path_), "' ends at byte ", offset, ", ", bytes,
                                        " bytes before its end"));
    }
    p += n;
    offset += n;
    bytes -= n;
  }
}

std::string read_small_file(const std::string& path, int64_t max_bytes) {
  const InputFile file(path);
  if (file.size() > max_bytes) {
    throw BadDataError(detail::concat("'", printable(path), "' has ", file.size(), " bytes, at most ",
                                      max_bytes, " are accepted"));
  }
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read_at(0, file.size(), text.data());
  return text;
}

bool path_exists(const std::string& path) {
  std::error_code error;
  const bool exists = std::filesystem::exists(path, error);
  if (error) {
    throw MissingInputError(detail::concat("cannot look at '", printable(path), "': ", error.message()));
  }
  return exists;
}

std::vector<std::string> names_in(const std::string& folder) {
  namespace fs = std::filesystem;
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory) {
    throw MissingInputError(detail::concat("cannot list '", printable(folder), "': ", error.message()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

void write_file(const std::string& path, const std::string& text, const SaveHook& hook) {
  OutputFile file(path, hook);
  file.write(text.data(), static_cast<int64_t>(text.size()));
  file.finish();
}

void make_directory(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) fail_save("create folder", path, error.value());
}

void sync_directory(const std::string& path, const SaveHook& hook) {
  announce(hook, "sync folder", path);
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_save("open folder", path, errno);
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  // File systems without directory sync say EINVAL; there is nothing more to do on them.
  if (error != 0 && error != EINVAL) fail_save("sync folder", path, error);
}

void rename_path(const std::string& from, const std::string& to, const SaveHook& hook) {
  announce(hook, "rename to", to);
  if (std::rename(from.c_str(), to.c_str()) != 0) fail_save("rename to", to, errno);
}

void remove_path(const std::string& path, const SaveHook& hook) {
  announce(hook, "remove", path);
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) fail_save("remove", path, error.value());
}

}  // namespace fp4t
