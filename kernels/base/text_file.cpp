#include "kernels/base/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// Closes `fd`, an open file.
std::string read_open(int fd, const std::string& path, size_t most) {
  struct stat info {};
  const bool regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  std::string text;
  std::vector<char> part(std::min(most, size_t{1} << 20));
  ssize_t n = regular ? 1 : 0;
  while (text.size() < most && (n > 0 || (n < 0 && errno == EINTR))) {
    n = ::read(fd, part.data(), std::min(part.size(), most - text.size()));
    if (n > 0) text.append(part.data(), static_cast<size_t>(n));
  }
  const int reason = errno;
  ::close(fd);
  if (!regular) throw BadDataError(printable(path) + " is no regular file");
  if (n < 0) throw BadDataError(detail::concat("cannot read ", printable(path), ": ", std::strerror(reason)));
  return text;
}

// Non-blocking: a FIFO in a file's place must not hang the run.
int open_to_read(const std::string& path) { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); }

[[noreturn]] void refuse_to_open(const std::string& path) {
  throw MissingInputError(detail::concat("cannot open ", printable(path), ": ", std::strerror(errno)));
}

}  // namespace

std::string read_text_file(const std::string& path) {
  const int fd = open_to_read(path);
  if (fd < 0) refuse_to_open(path);
  return read_open(fd, path, SIZE_MAX);
}

std::optional<std::string> read_text_file_if_there(const std::string& path, size_t most) {
  const int fd = open_to_read(path);
  if (fd < 0 && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  if (fd < 0) refuse_to_open(path);
  return read_open(fd, path, most);
}

}  // namespace fp4t
