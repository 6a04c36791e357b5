// The batch files of scripts/slurm, with stand-ins for what a cluster has: srun, mpirun and scontrol are
// scripts on PATH that write down how they were called, and the program is one that answers signals as
// fp4train does.
#include <csignal>
#include <filesystem>

#include "tests/support/process.h"
#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

// Notes its arguments and its process, then does what `srun` and `mpirun` do for one rank: becomes the
// program.
const char* const kLauncher = R"(#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$CALLS"
while [[ "$1" == -* ]]; do
  case "$1" in -np | --map-by) shift ;; esac
  shift
done
exec "$@"
)";

const char* const kScontrol = R"(#!/usr/bin/env bash
echo "scontrol $*" >>"$CALLS"
[ "$1" != show ] || echo "JobId=$3 JobState=${JOB_STATE:-RUNNING} Reason=None"
)";

// Runs until it is told to stop; `finish` as its last argument: ends at once with EXIT_CODE.
const char* const kProgram = R"(#!/usr/bin/env bash
echo "program $*" >>"$CALLS"
[ "${*: -1}" != finish ] || exit "${EXIT_CODE:-0}"
trap 'echo saved >>"$CALLS"; sleep 0.2; exit 75' USR1
echo ready >>"$CALLS"
while :; do sleep 0.02; done
)";

class Slurm : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(folder_ / "bin");
    fs::create_directory_symlink(from_environment("FP4T_TEST_SOURCE") + "/scripts", folder_ / "scripts");
    put("bin/srun", kLauncher);
    put("bin/mpirun", kLauncher);
    put("bin/scontrol", kScontrol);
    put("program", kProgram);
  }
  void put(const std::string& name, const std::string& text) {
    write_text(folder_ / name, text);
    fs::permissions(folder_ / name, fs::perms::owner_all);
  }
  Command batch(const std::string& file, const std::vector<std::string>& args) {
    Command command{{"/bin/bash", folder_ / ("scripts/slurm/" + file)}};
    command.words.insert(command.words.end(), args.begin(), args.end());
    return command;
  }
  std::map<std::string, std::string> environment(const std::map<std::string, std::string>& more = {}) {
    std::map<std::string, std::string> all = {{"PATH", (folder_ / "bin") + ":/usr/bin:/bin"},
                                              {"CALLS", folder_ / "calls"},
                                              {"FP4TRAIN", folder_ / "program"},
                                              {"SLURM_SUBMIT_DIR", folder_.path()},
                                              {"SLURM_JOB_ID", "4711"},
                                              {"SLURM_NTASKS", "8"},
                                              {"SLURM_NTASKS_PER_NODE", "4"},
                                              {"SLURM_CPUS_PER_TASK", "36"}};
    for (const auto& [name, value] : more) all[name] = value;
    return all;
  }
  std::string calls() { return read_text(folder_ / "calls"); }
  bool called(const std::string& what) { return calls().find(what) != std::string::npos; }
  Exit stopped_by(const std::string& file, int signal, const std::map<std::string, std::string>& more = {}) {
    fs::remove(folder_ / "calls");
    Process job(folder_.path(), batch(file, {"r.yaml", "--set", "run.seed=2"}), environment(more));
    EXPECT_TRUE(wait_until([&] { return called("ready"); }, 20)) << calls();
    job.signal(signal);
    return job.wait();
  }

  ScratchFolder folder_;
};

TEST_F(Slurm, the_files_ask_for_a_warning_and_to_come_back) {
  for (const char* file : {"train.sbatch", "train_mpirun.sbatch"}) {
    const std::string text = read_text(folder_ / (std::string("scripts/slurm/") + file));
    for (const char* line :
         {"\n#SBATCH --signal=B:USR1@300\n", "\n#SBATCH --requeue\n", "\n#SBATCH --ntasks-per-node=4\n",
          "\n#SBATCH --gpus-per-node=4\n", "\n#SBATCH --open-mode=append\n"}) {
      EXPECT_NE(text.find(line), std::string::npos) << file << " lacks " << line;
    }
    // Slurm reads its lines up to the first command.
    EXPECT_LT(text.rfind("#SBATCH "), text.find("\nset -euo")) << file;
  }
}

TEST_F(Slurm, a_job_that_ends_by_itself_keeps_its_exit_code_and_does_not_come_back) {
  for (const char* file : {"train.sbatch", "train_mpirun.sbatch"}) {
    for (const char* code : {"0", "2", "72"}) {
      fs::remove(folder_ / "calls");
      const Exit exit =
          Process(folder_.path(), batch(file, {"r.yaml", "finish"}), environment({{"EXIT_CODE", code}}))
              .wait();
      EXPECT_EQ(std::to_string(exit.code), code) << file << exit.errors;
      EXPECT_TRUE(called("program --config r.yaml finish")) << calls();
      EXPECT_FALSE(called("scontrol")) << calls();
    }
  }
  EXPECT_TRUE(called("mpirun -np 8 --map-by ppr:4:node:PE=36 ")) << calls();
  const Exit exit =
      Process(folder_.path(), batch("train.sbatch", {"r.yaml", "finish"}), environment()).wait();
  EXPECT_EQ(exit.code, 0);
  EXPECT_TRUE(called("srun --mpi=pmix ")) << calls();
  EXPECT_TRUE(called("--cpus-per-task=36 ")) << calls();
}

TEST_F(Slurm, a_warning_reaches_the_ranks_and_the_job_comes_back) {
  for (const char* file : {"train.sbatch", "train_mpirun.sbatch"}) {
    for (const int signal : {SIGUSR1, SIGTERM}) {
      const Exit exit = stopped_by(file, signal);
      EXPECT_EQ(exit.code, 75) << exit.errors;
      EXPECT_TRUE(called("program --config r.yaml --set run.seed=2")) << calls();
      EXPECT_TRUE(called("saved")) << calls();
      EXPECT_TRUE(called("scontrol requeue 4711")) << calls();
    }
  }
}

TEST_F(Slurm, a_cancelled_job_saves_and_stays_away) {
  // COMPLETING is what Slurm 22.05 says of a cancelled job whose script still runs.
  for (const char* state : {"COMPLETING", "CANCELLED"}) {
    const Exit exit = stopped_by("train.sbatch", SIGTERM, {{"JOB_STATE", state}});
    EXPECT_EQ(exit.code, 75) << exit.errors;
    EXPECT_TRUE(called("saved")) << calls();
    EXPECT_FALSE(called("requeue")) << calls();
  }
}

TEST_F(Slurm, a_launcher_that_dies_ends_the_job) {
  put("bin/srun", "#!/usr/bin/env bash\nkill -KILL $$\n");
  const Exit exit = Process(folder_.path(), batch("train.sbatch", {"r.yaml"}), environment()).wait();
  EXPECT_EQ(exit.code, 137) << exit.errors;
  EXPECT_FALSE(called("scontrol")) << calls();
}

TEST_F(Slurm, without_a_recipe_the_use_is_told) {
  for (const char* file : {"train.sbatch", "train_mpirun.sbatch", "check.sbatch"}) {
    const Exit exit = Process(folder_.path(), batch(file, {}), environment()).wait();
    EXPECT_EQ(exit.code, 2);
    EXPECT_NE(exit.errors.find(std::string("usage: sbatch scripts/slurm/") + file), std::string::npos)
        << exit.errors;
  }
}

// The whole way with the real program on two ranks: warned, saved, put back, started again by the same
// command.
TEST_F(Slurm, a_run_that_was_warned_goes_on_as_if_it_had_not_been) {
  if (!mpirun_passes_signals_on()) GTEST_SKIP() << "this mpirun does not pass SIGUSR1 on";
  put("bin/srun",
      "#!/usr/bin/env bash\nwhile [[ \"$1\" == -* ]]; do shift; done\nexec \"$MPIRUN\" --oversubscribe "
      "--allow-run-as-root --bind-to none --mca mpi_yield_when_idle 1 -np 2 \"$@\"\n");
  write_inputs(folder_.path(), std::string(kTinyModel) + R"(stages:
  - pretrain:
      steps: 400
      batch: {tokens: 64, micro_sequences: 1, length: 32}
      data: [{kind: sums}]
)");
  const auto real = environment(
      {{"FP4TRAIN", from_environment("FP4T_TEST_BINARY")}, {"MPIRUN", from_environment("FP4T_TEST_MPIRUN")}});
  const auto submit = [&](const std::string& dir) {
    return batch("train.sbatch", {"recipe.yaml", "--set", "run.device=cpu", "--set", "run.dir=" + dir});
  };
  EXPECT_EQ(Process(folder_.path(), submit("whole"), real).wait().code, 0);
  {
    Process job(folder_.path(), submit("run"), real);
    ASSERT_TRUE(wait_until([&] { return count_steps(folder_ / "run", "pretrain") > 0; }));
    job.signal(SIGUSR1);
    const Exit exit = job.wait();
    ASSERT_EQ(exit.code, 75) << exit.errors << exit.output;
    EXPECT_LT(count_steps(folder_ / "run", "pretrain"), 400);
  }
  EXPECT_TRUE(called("scontrol requeue 4711")) << calls();
  const Exit again = Process(folder_.path(), submit("run"), real).wait();
  EXPECT_EQ(again.code, 0) << again.errors;
  expect_same_outcome(folder_ / "run", folder_ / "whole");
}

TEST_F(Slurm, a_launcher_that_starts_copies_ends_the_job) {
  put("bin/srun",
      "#!/usr/bin/env bash\nwhile [[ \"$1\" == -* ]]; do shift; done\nexport SLURM_STEP_ID=0 "
      "SLURM_STEP_NUM_TASKS=2\nSLURM_PROCID=0 \"$@\" & SLURM_PROCID=1 \"$@\" & wait -n; code=$?; wait; exit "
      "$code\n");
  write_inputs(folder_.path(), kTinyRecipe);
  const Exit exit = Process(folder_.path(), batch("train.sbatch", {"recipe.yaml"}),
                            environment({{"FP4TRAIN", from_environment("FP4T_TEST_BINARY")}}))
                        .wait();
  EXPECT_EQ(exit.code, 2) << exit.errors;
  EXPECT_NE(exit.errors.find("2 processes (SLURM_STEP_NUM_TASKS), but MPI connects 1"), std::string::npos)
      << exit.errors;
  EXPECT_FALSE(fs::exists(folder_ / "run"));
  EXPECT_FALSE(called("requeue"));
}

TEST_F(Slurm, the_check_runs_on_four_ranks) {
  put("bin/srun",
      "#!/usr/bin/env bash\nwhile [[ \"$1\" == -* ]]; do shift; done\nexec \"$MPIRUN\" --oversubscribe "
      "--allow-run-as-root --bind-to none --mca mpi_yield_when_idle 1 -np 4 \"$@\"\n");
  write_inputs(folder_.path(), kTinyRecipe);
  const Exit exit = Process(folder_.path(), batch("check.sbatch", {"recipe.yaml"}),
                            environment({{"FP4TRAIN", from_environment("FP4T_TEST_BINARY")},
                                         {"MPIRUN", from_environment("FP4T_TEST_MPIRUN")}}))
                        .wait();
  EXPECT_EQ(exit.code, 0) << exit.errors << exit.output;
  for (const char* line : {"recipe.yaml: valid", "pretrain step=1/1", "ranks: connected"}) {
    EXPECT_NE(exit.output.find(line), std::string::npos) << line << " in\n" << exit.output;
  }
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    EXPECT_EQ(entry.path().string().find("fp4train-check"), std::string::npos) << "left behind";
  }
}

}  // namespace
}  // namespace fp4t::test
