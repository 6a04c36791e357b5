// The built binary as a child process: started, watched, signalled, waited for. Its output goes to files, so
// that nothing blocks. The binary is named by FP4T_TEST_BINARY.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace fp4t::test {

// A folder that goes away with the object.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string read_text(const std::string& path);  // "" when it is not there
void write_text(const std::string& path, const std::string& text);

// The value of a variable that ctest sets (tests/CMakeLists.txt).
std::string from_environment(const char* name);

struct Exit {
  int code = 0;        // 128 + number when a signal ended it
  std::string output;  // stdout
  std::string errors;  // stderr
  bool killed() const { return code == 128 + 9; }
};

// Words of a command line, program first.
struct Command {
  std::vector<std::string> words;
};

// The binary with `args`, and the same on n ranks under mpirun.
Command binary_command(const std::vector<std::string>& args);
Command ranks_command(int ranks, const std::vector<std::string>& args);
// Whether this mpirun passes SIGUSR1 on to what it starts, which one found in Ubuntu 24.04 (Open MPI 4.1.6)
// does not.
bool mpirun_passes_signals_on();

class Process {
 public:
  Process(const std::string& folder, const Command& command,
          const std::map<std::string, std::string>& environment = {});
  // Starts the binary with `args` in `folder`; `environment` is added to this process's.
  Process(const std::string& folder, const std::vector<std::string>& args,
          const std::map<std::string, std::string>& environment = {});
  // Kills it when it still runs.
  ~Process();
  Process(const Process&) = delete;

  pid_t pid() const { return pid_; }
  std::vector<pid_t> children() const;
  bool running();
  void signal(int number) const;
  // Soft limit on the size of files that it writes; unlimited again with -1. A signal that it does not
  // ignore ends it there.
  void limit_file_size(int64_t bytes) const;
  Exit wait();

 private:
  pid_t pid_ = -1;
  std::optional<int> code_;
  std::string out_, err_;
};

Exit run_binary(const std::string& folder, const std::vector<std::string>& args,
                const std::map<std::string, std::string>& environment = {});
Exit run_ranks(int ranks, const std::string& folder, const std::vector<std::string>& args,
               const std::map<std::string, std::string>& environment = {});

// Polls until `condition()`; false when it did not come true in time.
template <class Condition>
bool wait_until(const Condition& condition, double seconds = 120);
void sleep_seconds(double seconds);

template <class Condition>
bool wait_until(const Condition& condition, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    sleep_seconds(0.002);
  }
  return true;
}

}  // namespace fp4t::test
