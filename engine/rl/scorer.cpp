#include "engine/rl/scorer.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

using Clock = std::chrono::steady_clock;
using detail::concat;

constexpr size_t kLongestReply = 65536;
constexpr double kLargestReward = 1e9;  // far from where weighted sums and advantages would overflow
// Of one look at what a program says: one that never stops would hold the look for ever, deaf to its
// time-out and to a stop request.
constexpr size_t kMostOfALook = size_t{1} << 20;
constexpr size_t kMostLogged = size_t{1} << 20;  // of its standard error, for one list of requests

void close_if_open(int& fd) {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

void limit(int resource, int64_t value, int64_t unit) {
  if (value <= 0) return;
  const auto bytes = static_cast<rlim_t>(value * unit);
  const rlimit both = {bytes, bytes};
  ::setrlimit(static_cast<__rlimit_resource>(resource), &both);
}

// In the child, between fork and exec: calls that are safe there alone.
[[noreturn]] void become(const ScorerOptions& options, char* const* words, int in, int out, int err,
                         int failure) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  // What is ignored stays so through exec: SIGXFSZ is in a run, and would not end a program at file_mib.
  for (int number = 1; number < NSIG; ++number) ::signal(number, SIG_DFL);
  ::dup2(in, 0);
  ::dup2(out, 1);
  ::dup2(err, 2);
  limit(RLIMIT_CPU, options.cpu_seconds, 1);
  limit(RLIMIT_AS, options.memory_mib, int64_t{1} << 20);
  limit(RLIMIT_FSIZE, options.file_mib, int64_t{1} << 20);
  const rlimit no_core = {0, 0};
  ::setrlimit(RLIMIT_CORE, &no_core);
  ::execvp(words[0], words);
  const int reason = errno;
  [[maybe_unused]] const ssize_t told = ::write(failure, &reason, sizeof(reason));
  ::_exit(127);
}

std::string shown(const std::string& line) {
  std::string text = line.substr(0, 120);
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
  }
  return "'" + text + (line.size() > 120 ? "...'" : "'");
}

}  // namespace

struct Scorer::Impl {
  ScorerOptions options;
  pid_t pid = -1;
  int in = -1, out = -1, err = -1;  // this side's ends
  std::string replies, errors;      // begun lines
  std::string last_error;           // the last line of its standard error
  size_t logged = 0;                // bytes of it, of the present requests
  int64_t failures = 0;             // in a row

  explicit Impl(ScorerOptions o) : options(std::move(o)) {}
  ~Impl() { stop(true); }

  void log(const std::string& text) const {
    if (options.log) options.log("reward " + options.name + ": " + text);
  }

  void start() {
    int to[2] = {-1, -1}, from[2] = {-1, -1}, error[2] = {-1, -1}, failure[2] = {-1, -1};
    // A socket, because writing to one can be told to raise no signal.
    const bool open = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, to) == 0 &&
                      ::pipe2(from, O_CLOEXEC) == 0 && ::pipe2(error, O_CLOEXEC) == 0 &&
                      ::pipe2(failure, O_CLOEXEC) == 0;
    std::vector<char*> words;
    for (const std::string& word : options.command) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    pid = open ? ::fork() : -1;
    if (pid == 0) become(options, words.data(), to[1], from[1], error[1], failure[1]);
    const int reason = errno;
    for (int* fd : {&to[1], &from[1], &error[1], &failure[1]}) close_if_open(*fd);
    in = to[0];
    out = from[0];
    err = error[0];
    int refused = 0;
    ssize_t told = 0;
    while (pid > 0 && (told = ::read(failure[0], &refused, sizeof(refused))) < 0 && errno == EINTR) {
    }
    close_if_open(failure[0]);
    if (pid < 0 || told == sizeof(refused)) {
      const std::string why = std::strerror(pid < 0 ? reason : refused);
      stop(false);
      throw RecipeError(concat("reward ", printable(options.name), ": cannot start '",
                               printable(options.command[0]), "': ", why));
    }
    for (const int fd : {in, out, err}) ::fcntl(fd, F_SETFL, O_NONBLOCK);
    replies.clear();
    errors.clear();
    last_error.clear();
  }

  // Politely: its input ends, and it has two seconds.
  void stop(bool politely) {
    close_if_open(in);
    bool gone = pid <= 0;
    for (int i = 0; politely && !gone && i < 200; ++i) {
      gone = ::waitpid(pid, nullptr, WNOHANG) == pid;
      if (!gone) ::usleep(10000);
    }
    if (pid > 0) ::kill(-pid, SIGKILL);
    if (!gone) ::waitpid(pid, nullptr, 0);
    pid = -1;
    close_if_open(out);
    close_if_open(err);
  }

  // How it ended, of one that closed its output.
  std::string ending() {
    int status = 0;
    for (int i = 0; i < 100; ++i) {
      if (::waitpid(pid, &status, WNOHANG) == pid) {
        ::kill(-pid, SIGKILL);  // what it started
        pid = -1;
        if (WIFSIGNALED(status)) return concat("was ended by signal ", WTERMSIG(status), signal_hint(status));
        return concat("ended with status ", WEXITSTATUS(status));
      }
      ::usleep(10000);
    }
    return "closed its output";
  }
  std::string signal_hint(int status) const {
    const int number = WTERMSIG(status);
    if (number == SIGXCPU || (number == SIGKILL && options.cpu_seconds > 0))
      return " (cpu_seconds is a limit)";
    if (number == SIGXFSZ) return " (file_mib is a limit)";
    return options.memory_mib > 0 ? " (memory_mib is a limit)" : "";
  }

  // Reads what is there, within bounds; false when the other side has closed.
  static bool read_some(int fd, std::string& into) {
    char buffer[65536];
    for (size_t got = 0; got < kMostOfALook;) {
      const ssize_t n = ::read(fd, buffer, sizeof(buffer));
      if (n > 0) {
        into.append(buffer, static_cast<size_t>(n));
        got += static_cast<size_t>(n);
      } else if (n == 0) {
        return false;
      } else if (errno != EINTR) {
        return errno == EAGAIN;
      }
    }
    return true;
  }

  void log_error(const std::string& line) {
    last_error = line;
    if (logged >= kMostLogged) return;
    logged += line.size() + 32;  // with what a log puts in front of a line
    log(line);
    if (logged >= kMostLogged)
      log("(it goes on; the rest of what it says about these completions is left out)");
  }

  void take_errors() {
    if (err < 0) return;
    const bool open = read_some(err, errors);
    size_t at = 0;
    for (size_t end;
         (end = errors.find('\n', at)) != std::string::npos || errors.size() - at > kLongestReply;) {
      const size_t length = std::min(end - at, kLongestReply);  // of a line without an end, too
      log_error(errors.substr(at, length));
      at += length + (at + length == end ? 1 : 0);
    }
    errors.erase(0, at);
    if (!open) {
      if (!errors.empty()) log_error(errors);
      errors.clear();
      close_if_open(err);
    }
  }

  // "" or what is wrong with a reply.
  static std::string read_reply(const std::string& line, const std::map<int64_t, size_t>& places,
                                std::vector<std::optional<float>>& rewards) {
    const auto reply = nlohmann::json::parse(line, nullptr, false);
    if (!reply.is_object()) return "answered " + shown(line) + ", which is no JSON object";
    const auto id = reply.find("id"), reward = reply.find("reward");
    if (id == reply.end() || !id->is_number_integer())
      return "answered " + shown(line) + " without a whole 'id'";
    if (reward == reply.end() || !reward->is_number()) {
      return "answered " + shown(line) + " without a number as 'reward'";
    }
    const auto place = places.find(id->get<int64_t>());
    if (place == places.end() || rewards[place->second]) {
      return "answered " + shown(line) + ", whose id nobody waits for";
    }
    const double value = reward->get<double>();
    if (!(std::abs(value) <= kLargestReward)) {
      return "answered " + shown(line) + concat(", a reward outside of +-", kLargestReward);
    }
    rewards[place->second] = static_cast<float>(value);
    return "";
  }

  std::string failure(std::string what) {
    take_errors();
    if (!last_error.empty()) what += "; its last words: " + shown(last_error);
    return what;
  }

  // Asks for what is missing in `rewards`; "" when all is there, else why not.
  std::string ask(const std::vector<std::string>& lines, const std::map<int64_t, size_t>& places,
                  std::vector<std::optional<float>>& rewards) {
    std::string text;
    size_t missing = 0, sent = 0;
    for (size_t i = 0; i < lines.size(); ++i) {
      if (rewards[i]) continue;
      text += lines[i];
      ++missing;
    }
    auto last = Clock::now();
    while (missing > 0) {
      pollfd fds[3] = {{out, POLLIN, 0}, {err, POLLIN, 0}, {sent < text.size() ? in : -1, POLLOUT, 0}};
      ::poll(fds, 3, 100);
      if (options.wait) options.wait();
      take_errors();
      if (sent < text.size()) {
        const ssize_t n = ::send(in, text.data() + sent, text.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) sent += static_cast<size_t>(n);
      }
      const bool open = read_some(out, replies);
      size_t at = 0;
      for (size_t end; (end = replies.find('\n', at)) != std::string::npos; at = end + 1) {
        const std::string line = replies.substr(at, end - at);
        const std::string wrong = read_reply(line, places, rewards);
        if (!wrong.empty()) return failure(wrong);
        last = Clock::now();
        --missing;
      }
      replies.erase(0, at);
      if (missing == 0) break;
      if (!open) return failure(ending());
      if (replies.size() > kLongestReply)
        return failure("answered " + shown(replies) + ", a line without an end");
      const std::chrono::duration<double> silent = Clock::now() - last;
      if (silent.count() > options.timeout_seconds) {
        return failure(concat("gave no answer for ", options.timeout_seconds, " s, ", missing, " of ",
                              lines.size(), " missing"));
      }
    }
    return "";
  }
};

std::string program_obstacle(const std::string& program) {
  const auto may_run = [](const std::string& path) {
    struct stat info {};
    return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && ::access(path.c_str(), X_OK) == 0;
  };
  if (program.find('/') != std::string::npos) {
    return may_run(program) ? "" : concat("'", printable(program), "' is no program that may be run");
  }
  const char* const set = std::getenv("PATH");
  std::istringstream folders(set ? set : "/bin:/usr/bin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (may_run((folder.empty() ? "." : folder) + "/" + program)) return "";
  }
  return concat("no folder of PATH has a program '", printable(program), "'");
}

Scorer::Scorer(ScorerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {
  FP4T_CHECK(!impl_->options.command.empty(), "a scorer without a command");
}

Scorer::~Scorer() = default;

std::vector<float> Scorer::score(const std::vector<ScoreRequest>& requests) {
  std::vector<std::string> lines;
  std::map<int64_t, size_t> places;
  for (const ScoreRequest& r : requests) {
    FP4T_CHECK(places.emplace(r.id, lines.size()).second, "id ", r.id, " twice");
    const nlohmann::ordered_json line = {{"id", r.id},
                                         {"prompt", r.prompt},
                                         {"completion", r.completion},
                                         {"answer", r.answer},
                                         {"finished", r.finished}};
    lines.push_back(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
  std::vector<std::optional<float>> rewards(requests.size());
  impl_->logged = 0;
  for (;;) {
    if (impl_->pid <= 0) impl_->start();
    const std::string wrong = impl_->ask(lines, places, rewards);
    if (wrong.empty()) break;
    impl_->stop(false);
    if (++impl_->failures > impl_->options.restarts) {
      throw BadDataError(concat("reward ", printable(impl_->options.name), ": '",
                                printable(impl_->options.command[0]), "' ", wrong, "; given up after ",
                                impl_->options.restarts, " restarts"));
    }
    impl_->log("it " + wrong + concat("; restart ", impl_->failures, " of ", impl_->options.restarts));
  }
  impl_->failures = 0;
  std::vector<float> all;
  for (const auto& reward : rewards) all.push_back(*reward);
  return all;
}

}  // namespace fp4t
