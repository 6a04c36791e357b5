#include "kernels/base/memory_limit.h"

#include <filesystem>
#include <fstream>

namespace fp4t {

namespace {

namespace fs = std::filesystem;

// 0 when the file is not there or sets no limit ("max").
int64_t limit_in(const fs::path& file) {
  std::ifstream in(file);
  int64_t bytes = 0;
  return in >> bytes && bytes > 0 ? bytes : 0;
}

// Of a group and all groups around it. A group's name may be that of the host, of which a container sees the
// root alone.
int64_t smallest_limit(const fs::path& mount, fs::path group, const char* file) {
  int64_t smallest = 0;
  for (;; group = group.parent_path()) {
    const int64_t limit = limit_in(mount / group.relative_path() / file);
    if (limit > 0 && (smallest == 0 || limit < smallest)) smallest = limit;
    if (!group.has_relative_path()) return smallest;
  }
}

}  // namespace

int64_t control_group_limit(const std::string& self, const std::string& root) {
  std::ifstream groups(self);
  int64_t smallest = 0;
  for (std::string line; std::getline(groups, line);) {  // "number:controllers:group"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    int64_t limit = 0;
    if (controllers == ",,") limit = smallest_limit(root, group, "memory.max");
    if (controllers.find(",memory,") != std::string::npos) {
      limit = smallest_limit(fs::path(root) / "memory", group, "memory.limit_in_bytes");
    }
    if (limit > 0 && (smallest == 0 || limit < smallest)) smallest = limit;
  }
  return smallest;
}

}  // namespace fp4t
