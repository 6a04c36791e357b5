#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "engine/store/checkpoint.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

std::string holder_of(int fd) {
  char text[32] = {};
  const ssize_t n = ::pread(fd, text, sizeof text - 1, 0);
  std::string pid;
  for (ssize_t i = 0; i < n && text[i] >= '0' && text[i] <= '9'; ++i) pid += text[i];
  return pid.empty() ? "unknown" : pid;
}

// A process that was just killed holds its files until its memory is torn down; the same command, started at
// once, must not be refused for it.
constexpr auto kPatience = std::chrono::seconds(3);

bool lock_within_patience(int fd) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

}  // namespace

RunLock::RunLock(const std::string& run_dir) {
  make_directory(run_dir);
  const std::string path = run_dir + "/lock";
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0) throw SaveError(detail::concat("cannot open '", path, "': ", std::strerror(errno)));
  // The kernel drops the lock with its last holder, so a killed process never leaves one behind.
  if (!lock_within_patience(fd_)) {
    const int error = errno;
    const std::string holder = holder_of(fd_);
    ::close(fd_);
    if (error != EWOULDBLOCK) {
      throw SaveError(detail::concat("cannot lock '", path, "': ", std::strerror(error)));
    }
    throw RecipeError(detail::concat("run folder '", run_dir, "' is in use by process ", holder,
                                     "; wait for it, stop it, or set another run.dir"));
  }
  const std::string pid = std::to_string(::getpid()) + "\n";
  const bool written = ::ftruncate(fd_, 0) == 0 &&
                       ::pwrite(fd_, pid.data(), pid.size(), 0) == static_cast<ssize_t>(pid.size());
  if (!written) {
    const int error = errno;
    ::close(fd_);
    throw SaveError(detail::concat("cannot write '", path, "': ", std::strerror(error)));
  }
}

// The file stays: removing it would let a third process lock a new file beside a waiting second.
RunLock::~RunLock() { ::close(fd_); }

}  // namespace fp4t
