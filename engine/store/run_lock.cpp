#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>

#include "engine/store/checkpoint.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;

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

std::vector<std::string> missing_folders(const std::string& dir) {
  std::vector<std::string> missing;
  std::error_code error;
  for (fs::path path = dir; !path.empty() && !fs::exists(path, error) && !error; path = path.parent_path()) {
    if (path.has_filename()) missing.push_back(path.string());
  }
  return missing;
}

// Whether the open file is the one that the path leads to.
bool is_in_place(int fd, const std::string& path) {
  struct stat opened {
  }, there{};
  return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &there) == 0 && opened.st_ino == there.st_ino &&
         opened.st_dev == there.st_dev;
}

}  // namespace

RunLock::RunLock(const std::string& run_dir) : dir_(run_dir), made_(missing_folders(run_dir)) {
  const std::string path = run_dir + "/lock";
  // A holder whose start is refused takes the file away with the folder that it made: whoever waited for it
  // holds nothing then.
  do {
    if (fd_ >= 0) ::close(fd_);
    make_directory(run_dir);
    open_and_lock(path);
  } while (!is_in_place(fd_, path));
  const std::string pid = std::to_string(::getpid()) + "\n";
  const bool written = ::ftruncate(fd_, 0) == 0 &&
                       ::pwrite(fd_, pid.data(), pid.size(), 0) == static_cast<ssize_t>(pid.size());
  if (!written) {
    const int error = errno;
    ::close(fd_);
    throw SaveError(detail::concat("cannot write '", printable(path), "': ", std::strerror(error)));
  }
}

void RunLock::open_and_lock(const std::string& path) {
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0) throw SaveError(detail::concat("cannot open '", printable(path), "': ", std::strerror(errno)));
  // The kernel drops the lock with its last holder, so a killed process never leaves one behind.
  if (lock_within_patience(fd_)) return;
  const int error = errno;
  const std::string holder = holder_of(fd_);
  ::close(fd_);
  if (error != EWOULDBLOCK) {
    throw SaveError(detail::concat("cannot lock '", printable(path), "': ", std::strerror(error)));
  }
  throw RecipeError(detail::concat("run folder '", printable(dir_), "' is in use by process ", holder,
                                   "; wait for it, stop it, or set another run.dir"));
}

// Removes what stands in the folder before anything is written: an empty `checkpoints`, and the lock.
void RunLock::leave_no_trace() const {
  if (made_.empty()) return;
  ::rmdir((dir_ + "/checkpoints").c_str());  // stays when anything is in it
  std::error_code error;
  for (fs::directory_iterator it(dir_, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename() != "lock") return;
  }
  if (error) return;
  ::unlink((dir_ + "/lock").c_str());
  for (const std::string& folder : made_) {
    if (::rmdir(folder.c_str()) != 0) return;  // another run has come to lie in it
  }
}

RunLock::~RunLock() {
  leave_no_trace();
  ::close(fd_);
}

}  // namespace fp4t
