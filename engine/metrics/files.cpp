#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "engine/metrics/metrics.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

void make_run_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw SaveError(detail::concat("cannot create folder ", printable(path), ": ", error.message()));
}

void write_text_file(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".tmp";
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  bool good = fd >= 0;
  for (size_t done = 0; good && done < text.size();) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    good = n > 0 || (n < 0 && errno == EINTR);
    if (n > 0) done += static_cast<size_t>(n);
  }
  good = good && ::fsync(fd) == 0;
  const int reason = errno;
  if (fd >= 0) ::close(fd);
  if (good && std::rename(temporary.c_str(), path.c_str()) == 0) return;
  const std::string why = std::strerror(good ? errno : reason);
  if (fd >= 0) ::unlink(temporary.c_str());
  throw SaveError(detail::concat("cannot write ", printable(path), ": ", why));
}

}  // namespace fp4t
