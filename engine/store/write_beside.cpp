#include "engine/store/write_beside.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;

constexpr const char* kWriting = ".tmp.";
constexpr const char* kReplaced = ".replaced.";

std::string parent_of(const std::string& target) {
  const std::string parent = fs::path(target).parent_path().string();
  return parent.empty() ? "." : parent;
}

// An open folder with its flock, which ends with the process.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW)) {
    struct stat opened {
    }, there{};
    held_ = fd_ >= 0 && ::flock(fd_, LOCK_EX | LOCK_NB) == 0;
    error_ = errno;
    in_place_ = fd_ >= 0 && ::fstat(fd_, &opened) == 0 && ::stat(path.c_str(), &there) == 0 &&
                opened.st_ino == there.st_ino && opened.st_dev == there.st_dev;
  }
  ~FolderLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  bool held() const { return held_ && in_place_; }
  // Some network file systems lock no folders: nobody else removes it there either.
  bool cannot_be() const { return !held_ && in_place_ && error_ != EWOULDBLOCK; }

 private:
  int fd_, error_ = 0;
  bool held_ = false, in_place_ = false;
};

// The folder beside the target in which this process writes, held until the end.
class Temporary {
 public:
  Temporary(const std::string& path, const SaveHook& hook) {
    // A neighbour that clears up may see it before it is held; one that works in it, on another machine where
    // it has the same number, does not let go.
    constexpr int kTries = 100;
    for (int i = 0; i < kTries; ++i) {
      make_directory(path);
      lock_ = std::make_unique<FolderLock>(path);
      if (lock_->held()) return;
      if (lock_->cannot_be()) {
        remove_path(path, hook);
        make_directory(path);
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    throw SaveError("'" + printable(path) + "' is in use by another process");
  }

 private:
  std::unique_ptr<FolderLock> lock_;
};

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

// What killed processes left beside the target.
void put_right(const std::string& target, const SaveHook& hook) {
  const std::string name = fs::path(target).filename().string(), parent = parent_of(target);
  for (const std::string& other : names_in(parent)) {
    for (const char* kind : {kReplaced, kWriting}) {
      if (!other.starts_with(name + kind) || !is_number(other.substr(name.size() + std::strlen(kind))))
        continue;
      const std::string path = (fs::path(parent) / other).string();
      const FolderLock unused(path);
      if (!unused.held()) continue;  // somebody is at work in it
      if (kind == kReplaced && !path_exists(target)) {
        rename_path(path, target, hook);  // killed between the two renames
      } else {
        remove_path(path, hook);
      }
    }
  }
}

// Afterwards `temporary` is gone, or is what stood at the target; the latter is removed.
void put_in_place(const std::string& temporary, const std::string& target, bool there, const SaveHook& hook) {
  const std::string parent = parent_of(target);
  if (!there) {
    rename_path(temporary, target, hook);
    return sync_directory(parent, hook);
  }
  if (hook) hook("exchange " + fs::path(target).filename().string());
  std::string old = temporary;
  if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) != 0) {
    old = target + kReplaced + std::to_string(::getpid());
    rename_path(target, old, hook);
    try {
      rename_path(temporary, target, hook);
    } catch (...) {
      std::error_code ignored;  // the first error is the one to report
      fs::rename(old, target, ignored);
      throw;
    }
  }
  sync_directory(parent, hook);
  remove_path(old, hook);
}

}  // namespace

void write_beside(const std::string& to, bool replace, const std::string& mark, const SaveHook& hook,
                  const std::function<void(const std::string& folder)>& write) {
  const fs::path place = fs::path(to).lexically_normal();
  const std::string target = (place.has_filename() ? place : place.parent_path()).string();
  if (target.empty()) throw RecipeError("--to: an empty text is no folder");
  put_right(target, hook);
  const bool there = path_exists(target);
  if (there && !replace)
    throw RecipeError("'" + printable(target) + "' is already there; --replace writes over it");
  if (there && !path_exists(target + "/" + mark)) {
    throw RecipeError("'" + printable(target) + "' is there and has no " + mark +
                      ": not a folder that --replace removes");
  }
  const std::string path = target + kWriting + std::to_string(::getpid());
  const Temporary temporary(path, hook);
  try {
    write(path);
    put_in_place(path, target, there, hook);
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report
    fs::remove_all(path, ignored);
    throw;
  }
}

}  // namespace fp4t
