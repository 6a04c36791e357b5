#include "tests/support/process.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace fp4t::test {

namespace fs = std::filesystem;

ScratchFolder::ScratchFolder() {
  std::string pattern = (fs::temp_directory_path() / "fp4t_run_XXXXXX").string();
  if (!::mkdtemp(pattern.data())) throw std::runtime_error("no scratch folder: " + pattern);
  path_ = pattern;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (!(out << text)) throw std::runtime_error("cannot write " + path);
}

std::string from_environment(const char* name) {
  const char* value = std::getenv(name);
  if (!value) throw std::runtime_error(std::string(name) + " is not set; ctest sets it");
  return value;
}

namespace {

// Between fork and exec: only calls that are safe there.
void redirect(int to, const char* path) {
  const int fd = ::open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd < 0 || ::dup2(fd, to) < 0) ::_exit(126);
}

}  // namespace

Command binary_command(const std::vector<std::string>& args) {
  Command command{{from_environment("FP4T_TEST_BINARY")}};
  command.words.insert(command.words.end(), args.begin(), args.end());
  return command;
}

namespace {
Command under_mpirun(int ranks, const Command& program) {
  Command command{{from_environment("FP4T_TEST_MPIRUN"), "--oversubscribe", "--allow-run-as-root",
                   "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "-np", std::to_string(ranks)}};
  command.words.insert(command.words.end(), program.words.begin(), program.words.end());
  return command;
}
}  // namespace

Command ranks_command(int ranks, const std::vector<std::string>& args) {
  return under_mpirun(ranks, binary_command(args));
}

bool mpirun_passes_signals_on() {
  const ScratchFolder folder;
  const std::string script = "trap 'exit 75' USR1; : >ready; for ((i = 0; i < 50; ++i)); do sleep 0.1; done";
  Process job(folder.path(), under_mpirun(1, {{"/bin/bash", "-c", script}}));
  if (!wait_until([&] { return std::filesystem::exists(folder / "ready") || !job.running(); })) return false;
  job.signal(SIGUSR1);
  return job.wait().code == 75;
}

Process::Process(const std::string& folder, const std::vector<std::string>& args,
                 const std::map<std::string, std::string>& environment)
    : Process(folder, binary_command(args), environment) {}

Process::Process(const std::string& folder, const Command& command,
                 const std::map<std::string, std::string>& environment) {
  static std::atomic<int> count{0};
  const int number = count++;
  out_ = folder + "/stdout." + std::to_string(number);
  err_ = folder + "/stderr." + std::to_string(number);
  std::vector<std::string> words = command.words;
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  if (pid_ == 0) {
    redirect(STDOUT_FILENO, out_.c_str());
    redirect(STDERR_FILENO, err_.c_str());
    if (::chdir(folder.c_str()) != 0) ::_exit(126);
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
}

Process::~Process() {
  if (!running()) return;
  signal(SIGKILL);
  wait();
}

std::vector<pid_t> Process::children() const {
  const std::string pid = std::to_string(pid_);
  std::istringstream list(read_text("/proc/" + pid + "/task/" + pid + "/children"));
  std::vector<pid_t> pids;
  for (pid_t child = 0; list >> child;) pids.push_back(child);
  return pids;
}

bool Process::running() {
  if (code_) return false;
  int status = 0;
  if (::waitpid(pid_, &status, WNOHANG) != pid_) return true;
  code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return false;
}

void Process::signal(int number) const {
  if (!code_) ::kill(pid_, number);
}

void Process::limit_file_size(int64_t bytes) const {
  rlimit limit{};
  if (::prlimit(pid_, RLIMIT_FSIZE, nullptr, &limit) != 0) throw std::runtime_error("prlimit");
  limit.rlim_cur = bytes < 0 ? limit.rlim_max : static_cast<rlim_t>(bytes);
  if (::prlimit(pid_, RLIMIT_FSIZE, &limit, nullptr) != 0) throw std::runtime_error("prlimit");
}

Exit Process::wait() {
  while (!code_) {
    int status = 0;
    if (::waitpid(pid_, &status, 0) != pid_) {
      if (errno == EINTR) continue;
      throw std::runtime_error(std::string("waitpid: ") + std::strerror(errno));
    }
    code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  return {*code_, read_text(out_), read_text(err_)};
}

Exit run_binary(const std::string& folder, const std::vector<std::string>& args,
                const std::map<std::string, std::string>& environment) {
  return Process(folder, args, environment).wait();
}

Exit run_ranks(int ranks, const std::string& folder, const std::vector<std::string>& args,
               const std::map<std::string, std::string>& environment) {
  return Process(folder, ranks_command(ranks, args), environment).wait();
}

void sleep_seconds(double seconds) { ::usleep(static_cast<useconds_t>(seconds * 1e6)); }

}  // namespace fp4t::test
