// Parts of a reward, and programs that reward: that they are asked, watched, limited and never made up for.
#include "engine/rl/rewards.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>

#include "engine/recipe/load.h"
#include "engine/rl/scorer.h"
#include "kernels/base/check.h"
#include "tests/support/process.h"
#include "tests/unit/recipe_text.h"

namespace fp4t {
namespace {

Judged judged(const std::string& completion, int64_t tokens, Verdict verdict) {
  return {.id = 0,
          .prompt = "p",
          .completion = completion,
          .answer = "a",
          .tokens = tokens,
          .finished = true,
          .verdict = verdict};
}

TEST(Rewards, without_a_list_are_the_verdict) {
  Rewards rewards({}, 16, {});
  EXPECT_EQ(rewards.names(), std::vector<std::string>{"verifier"});
  const auto parts = rewards.parts({judged("x", 3, Verdict::kRight), judged("x", 3, Verdict::kWrong),
                                    judged("x", 3, Verdict::kUnverifiable)});
  EXPECT_EQ(parts, (std::vector<std::vector<float>>{{1}, {0}, {0}}));
  EXPECT_EQ(rewards.total({1}), 1.0f);
}

// 2 * right - 0.5 * overlong + 0.25 * format. Overlong from 8 of 24 tokens: 0 at 8, a half at 16, 1 at 24.
TEST(Rewards, are_summed_by_weight) {
  std::vector<RewardSpec> specs(3);
  specs[0].weight = 2;
  specs[1].kind = "length";
  specs[1].weight = 0.5;
  specs[1].free_tokens = 8;
  specs[2].kind = "format";
  specs[2].name = "digits";
  specs[2].weight = 0.25;
  specs[2].pattern = "^[0-9]+$";
  Rewards rewards(specs, 24, {});
  EXPECT_EQ(rewards.names(), (std::vector<std::string>{"verifier", "length", "digits"}));
  const auto parts =
      rewards.parts({judged("12", 8, Verdict::kRight), judged("1x", 16, Verdict::kRight),
                     judged("12", 24, Verdict::kWrong), judged("12", 9, Verdict::kUnverifiable)});
  EXPECT_EQ(parts, (std::vector<std::vector<float>>{{1, 0, 1}, {1, -0.5, 0}, {0, -1, 1}, {0, -0.0625, 1}}));
  EXPECT_EQ(rewards.total(parts[0]), 2.25f);
  EXPECT_EQ(rewards.total(parts[1]), 1.75f);
  EXPECT_EQ(rewards.total(parts[2]), -0.25f);
  EXPECT_EQ(rewards.total(parts[3]), 0.21875f);
}

TEST(Rewards, say_when_a_pattern_gave_up) {
  std::vector<RewardSpec> specs(1);
  specs[0].kind = "format";
  specs[0].name = "slow";
  specs[0].pattern = "(a+)+$";
  std::string log;
  Rewards rewards(specs, 24, {[&](const std::string& line) { log += line; }, {}});
  EXPECT_EQ(rewards.parts({judged(std::string(5000, 'a') + "!", 8, Verdict::kRight)})[0][0], 0.0f);
  EXPECT_NE(log.find("gave up in 1 of 1"), std::string::npos) << log;
}

class ScorerTest : public ::testing::Test {
 protected:
  ScorerOptions options(const std::string& script) {
    test::write_text(folder_ / "judge.py", script);
    ScorerOptions o;
    o.name = "judge";
    o.command = {"python3", folder_ / "judge.py", folder_.path()};
    o.timeout_seconds = 20;
    o.log = [this](const std::string& line) { log_ += line + "\n"; };
    return o;
  }
  std::vector<ScoreRequest> requests(int n) {
    std::vector<ScoreRequest> list;
    for (int i = 0; i < n; ++i) list.push_back({100 + i, "p", "c" + std::to_string(i), "a", i % 2 == 0});
    return list;
  }
  std::string refusal(const ScorerOptions& o, int n = 2) {
    try {
      Scorer(o).score(requests(n));
    } catch (const BadDataError& e) {
      return e.what();
    }
    ADD_FAILURE() << "no error";
    return "";
  }
  test::ScratchFolder folder_;
  std::string log_;
};

const char* const kHead = "import json, os, sys, time\nfolder = sys.argv[1]\n";
const std::string kEcho =
    "for line in sys.stdin:\n"
    "  r = json.loads(line)\n"
    "  print(json.dumps({'id': r['id'], 'reward': r['id'] + 0.5 * r['finished']}), flush=True)\n";

TEST_F(ScorerTest, gives_each_request_its_own_reward_in_any_order) {
  Scorer scorer(
      options(kHead + std::string("lines = []\n"
                                  "for line in sys.stdin:\n"
                                  "  lines.append(json.loads(line))\n"
                                  "  if len(lines) == 3:\n"
                                  "    for r in reversed(lines):\n"
                                  "      value = int(r['completion'][1:]) - 0.25 * r['finished']\n"
                                  "      print(json.dumps({'id': r['id'], 'reward': value}), flush=True)\n"
                                  "    lines = []\n")));
  EXPECT_EQ(scorer.score(requests(3)), (std::vector<float>{-0.25f, 1, 1.75f}));
  EXPECT_EQ(scorer.score(requests(3)), (std::vector<float>{-0.25f, 1, 1.75f}));  // the same process
  EXPECT_EQ(scorer.score({}), std::vector<float>{});
}

// Requests and replies of more than any pipe holds, both ways at once.
TEST_F(ScorerTest, many_long_requests_do_not_block) {
  Scorer scorer(
      options(kHead + std::string("for line in sys.stdin:\n"
                                  "  r = json.loads(line)\n"
                                  "  print(json.dumps({'id': r['id'], 'reward': len(r['completion']),"
                                  " 'note': 'x' * 1000}))\n"
                                  "  sys.stdout.flush()\n")));
  std::vector<ScoreRequest> many = requests(2000);
  for (ScoreRequest& r : many) r.completion = std::string(1000, 'y');
  many[7].completion =
      "a\xff"
      "b";  // no UTF-8: U+FFFD in its place
  const std::vector<float> rewards = scorer.score(many);
  EXPECT_EQ(rewards[0], 1000.0f);
  EXPECT_EQ(rewards[7], 3.0f);
}

TEST_F(ScorerTest, one_that_dies_is_asked_again_for_what_is_missing) {
  const std::string once =
      "path = folder + '/died'\n"
      "first = not os.path.exists(path)\n"
      "open(path, 'a').write('x')\n"
      "print('starting', file=sys.stderr, flush=True)\n"
      "for line in sys.stdin:\n"
      "  r = json.loads(line)\n"
      "  if first and r['id'] == 101: sys.exit(3)\n"
      "  open(folder + '/asked', 'a').write(str(r['id']) + ' ')\n"
      "  print(json.dumps({'id': r['id'], 'reward': 1}), flush=True)\n";
  Scorer scorer(options(kHead + once));
  EXPECT_EQ(scorer.score(requests(3)), (std::vector<float>{1, 1, 1}));
  EXPECT_EQ(test::read_text(folder_ / "asked"), "100 101 102 ");
  EXPECT_NE(log_.find("reward judge: starting"), std::string::npos) << log_;
  EXPECT_NE(log_.find("it ended with status 3; its last words: 'starting'; restart 1 of 3"),
            std::string::npos)
      << log_;
}

TEST_F(ScorerTest, one_that_keeps_dying_is_an_error_and_never_a_zero) {
  ScorerOptions o =
      options(kHead + std::string("open(folder + '/starts', 'a').write('x')\nsys.exit('no model')\n"));
  o.restarts = 2;
  const std::string why = refusal(o);
  EXPECT_NE(why.find("reward judge: 'python3' ended with status 1; its last words: 'no model'; given up "
                     "after 2 restarts"),
            std::string::npos)
      << why;
  EXPECT_EQ(test::read_text(folder_ / "starts"), "xxx");
}

TEST_F(ScorerTest, silence_is_an_error_after_its_time) {
  ScorerOptions o = options(kHead + std::string("import subprocess\n"
                                                "child = subprocess.Popen(['sleep', '1000'])\n"
                                                "open(folder + '/child', 'w').write(str(child.pid))\n"
                                                "time.sleep(1000)\n"));
  o.timeout_seconds = 1.5;
  o.restarts = 0;
  const auto begin = std::chrono::steady_clock::now();
  const std::string why = refusal(o);
  EXPECT_NE(why.find("gave no answer for 1.5 s, 2 of 2 missing"), std::string::npos) << why;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  // What it started is gone, too.
  const std::string child = test::read_text(folder_ / "child");
  ASSERT_FALSE(child.empty());
  EXPECT_TRUE(test::wait_until(
      [&] {
        return ::kill(std::stoi(child), 0) != 0 ||
               test::read_text("/proc/" + child + "/stat").find(") Z") != std::string::npos;
      },
      10));
}

// Neither its answers nor its standard error keep a run from its time-out, its memory or its log.
TEST_F(ScorerTest, one_that_never_stops_printing_is_ended) {
  const auto begin = std::chrono::steady_clock::now();
  for (const char* flood : {"exec cat /dev/zero", "exec cat /dev/zero >&2", "exec yes '' >&2", "exec yes"}) {
    ScorerOptions o;
    o.name = "judge";
    o.command = {"sh", "-c", flood};
    o.timeout_seconds = 0.3;
    o.restarts = 0;
    log_.clear();
    o.log = [this](const std::string& line) { log_ += line + "\n"; };
    const std::string why = refusal(o);
    EXPECT_NE(why.find("given up after 0 restarts"), std::string::npos) << why;
    EXPECT_LT(log_.size(), size_t{4} << 20) << flood;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(40));
}

TEST_F(ScorerTest, a_line_of_its_standard_error_loses_nothing) {
  const size_t longest = 65536;
  ScorerOptions o =
      options(kHead + std::string("print('x' * 65536 + 'end', file=sys.stderr, flush=True)\n") + kEcho);
  EXPECT_EQ(Scorer(o).score(requests(1)), std::vector<float>{100.5f});
  EXPECT_NE(log_.find(std::string(longest, 'x') + "\nreward judge: end\n"), std::string::npos);
}

TEST_F(ScorerTest, malformed_replies_are_named) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"'hello'", "answered 'hello', which is no JSON object"},
      {"json.dumps({'reward': 1})", "without a whole 'id'"},
      {"json.dumps({'id': 100, 'reward': 'high'})", "without a number as 'reward'"},
      {"json.dumps({'id': 999, 'reward': 1})", "whose id nobody waits for"},
      {"'{\"id\": 100, \"reward\": 1e999}'", "'{\"id\": 100, \"reward\": 1e999}'"},
      {"json.dumps({'id': 100, 'reward': 2e9})", "a reward outside of +-1e+09"},
      {"json.dumps({'id': 100, 'reward': -1e300})", "a reward outside of +-1e+09"},
      {"'x' * 100000", "answered 'xxxx"},
  };
  for (const auto& [reply, message] : cases) {
    ScorerOptions o = options(kHead + ("for line in sys.stdin: print(" + reply + ", flush=True)\n"));
    o.restarts = 0;
    const std::string why = refusal(o, 1);
    EXPECT_NE(why.find(message), std::string::npos) << why;
  }
}

TEST_F(ScorerTest, limits_are_those_of_the_recipe) {
  ScorerOptions o =
      options(kHead + std::string("import resource\n"
                                  "get = resource.getrlimit\n"
                                  "values = [get(resource.RLIMIT_CPU)[0], get(resource.RLIMIT_AS)[0] >> 20,"
                                  " get(resource.RLIMIT_FSIZE)[0] >> 20]\n"
                                  "for line, value in zip(sys.stdin, values):\n"
                                  "  print(json.dumps({'id': json.loads(line)['id'], 'reward': value}),"
                                  " flush=True)\n"
                                  "sys.stdin.read()\n"));
  o.cpu_seconds = 7;
  o.memory_mib = 2000;
  o.file_mib = 3;
  EXPECT_EQ(Scorer(o).score(requests(3)), (std::vector<float>{7, 2000, 3}));
  o = options(kHead + std::string("sys.stdin.readline()\nwhile True: pass\n"));
  o.cpu_seconds = 1;
  o.restarts = 0;
  const std::string why = refusal(o);
  EXPECT_NE(why.find("was ended by signal"), std::string::npos) << why;
  EXPECT_NE(why.find("cpu_seconds is a limit"), std::string::npos) << why;
}

TEST_F(ScorerTest, a_limit_of_files_ends_it_in_a_run_that_ignores_the_signal) {
  const auto before = std::signal(SIGXFSZ, SIG_IGN);  // as install_stop_handlers() has it
  ScorerOptions o;
  o.name = "judge";
  o.command = {"sh", "-c", "exec head -c 3000000 /dev/zero > " + (folder_ / "large")};
  o.file_mib = 1;
  o.restarts = 0;
  const std::string why = refusal(o);
  std::signal(SIGXFSZ, before);
  EXPECT_NE(why.find("was ended by signal 25 (file_mib is a limit)"), std::string::npos) << why;
}

TEST_F(ScorerTest, a_program_that_is_not_there_is_an_error_at_once) {
  ScorerOptions o;
  o.name = "judge";
  o.command = {"no-such-program-anywhere"};
  try {
    Scorer(o).score(requests(1));
    FAIL() << "started";
  } catch (const RecipeError& e) {
    EXPECT_NE(std::string(e.what()).find("cannot start 'no-such-program-anywhere': No such file"),
              std::string::npos)
        << e.what();
  }
}

TEST(Rewards, patterns_and_programs_of_a_later_stage_are_checked_before_the_run) {
  const auto refusal = [](const std::string& rewards) -> std::string {
    const auto [recipe, text, places] =
        parse_recipe(test::with_rl(), "r.yaml", {"stages[1].rl.rewards=" + rewards});
    try {
      check_rewards(recipe, places);
      return "";
    } catch (const RecipeError& e) {
      return e.what();
    }
  };
  const test::ScratchFolder folder;
  test::write_text(folder / "notes", "no program");
  EXPECT_EQ(refusal("[{kind: process, command: [sh, -c, exit]}, {kind: format, pattern: '#+'}]"), "");
  EXPECT_EQ(refusal("[{kind: process, command: [/bin/sh]}]"), "");
  const std::string at = "--set: stages[1].rl.rewards[";
  EXPECT_EQ(refusal("[{kind: verifier}, {kind: process, command: no-such-program}]"),
            at + "1].command: no folder of PATH has a program 'no-such-program'");
  EXPECT_EQ(refusal("[{kind: process, command: " + (folder / "notes") + "}]"),
            at + "0].command: '" + (folder / "notes") + "' is no program that may be run");
  EXPECT_EQ(refusal("[{kind: process, command: /}]"), at + "0].command: '/' is no program that may be run");
  EXPECT_EQ(refusal("[{kind: format, pattern: (}]").find(at + "0].pattern: no regular expression: "), 0u);
}

TEST_F(ScorerTest, waiting_may_be_stopped) {
  ScorerOptions o = options(kHead + std::string("time.sleep(1000)\n"));
  o.wait = [] { throw PreemptedError("stop"); };
  EXPECT_THROW(Scorer(o).score(requests(1)), PreemptedError);
}

}  // namespace
}  // namespace fp4t
