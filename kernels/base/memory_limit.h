// How much memory this process may take where a container or a batch system allows less than the machine has.
#pragma once

#include <cstdint>
#include <string>

namespace fp4t {

// The smallest limit of the control groups (version 2 and 1) around this process, in bytes; 0 when there is
// none. `self` lists the groups as /proc/self/cgroup does, `root` is where they are mounted.
int64_t control_group_limit(const std::string& self = "/proc/self/cgroup",
                            const std::string& root = "/sys/fs/cgroup");

}  // namespace fp4t
