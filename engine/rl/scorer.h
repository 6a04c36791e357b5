// A program of the user's that rewards completions: a child process that reads one JSON object a line from
// its standard input and answers each with one on its standard output, in any order.
//   request: {"id": 17, "prompt": "...", "completion": "...", "answer": "...", "finished": true}
//   reply:   {"id": 17, "reward": 0.5}
// Bytes that are no UTF-8 reach it as U+FFFD. It is started without a shell, in a process group of its own
// that is killed with it, inherits the environment, and may live for a whole stage: it should flush each
// reply. A program that ends, answers something else or does not answer in time is started again and asked
// anew for what is missing. After `restarts` of these in a row score() throws: a reward is never made up.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fp4t {

struct ScorerOptions {
  std::string name;                  // in messages
  std::vector<std::string> command;  // program (looked up in PATH) and arguments
  double timeout_seconds = 30;       // without any reply
  int64_t restarts = 3;              // in a row; one that answered all counts from 0 again
  int64_t cpu_seconds = 0;           // limits of the process (setrlimit); 0: none
  int64_t memory_mib = 0;
  int64_t file_mib = 0;
  std::function<void(const std::string&)> log;  // lines of its standard error, and restarts
  std::function<void()> wait;                   // called about ten times a second; may throw to stop
};

struct ScoreRequest {
  int64_t id = 0;  // unique in one call
  std::string prompt, completion, answer;
  bool finished = false;
};

// Why a program cannot be started, looked up as execvp does; "" where it seems to be one.
std::string program_obstacle(const std::string& program);

class Scorer {
 public:
  explicit Scorer(ScorerOptions options);
  ~Scorer();
  Scorer(const Scorer&) = delete;
  // Rewards in the order of the requests. Throws BadDataError, and RecipeError when the program cannot be
  // started at all.
  std::vector<float> score(const std::vector<ScoreRequest>& requests);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fp4t
