// What launchers tell a process, and what fp4train makes of it: N copies of one rank are refused before
// anything is written, and a job around a single process is not taken for N.
#include "engine/comm/comm.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

using Environment = std::map<std::string, std::string>;

// This process's environment with launchers' variables of the test alone.
struct Launch {
  int processes = 1;
  std::string variable;
};
Launch launch_with(const Environment& variables) {
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID"}) {
    ::unsetenv(name);
  }
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  Launch launch;
  launch.processes = launched_processes(&launch.variable);
  for (const auto& [name, value] : variables) ::unsetenv(name.c_str());
  return launch;
}

TEST(Launch, the_innermost_launcher_says_how_many_processes_it_started) {
  const struct {
    Environment variables;
    int processes;
    const char* variable;
  } cases[] = {
      {{}, 1, ""},
      {{{"OMPI_COMM_WORLD_SIZE", "4"}}, 4, "OMPI_COMM_WORLD_SIZE"},
      {{{"PMI_SIZE", "3"}}, 3, "PMI_SIZE"},
      {{{"MV2_COMM_WORLD_SIZE", "5"}}, 5, "MV2_COMM_WORLD_SIZE"},
      {{{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_NTASKS", "8"}},
       8,
       "SLURM_STEP_NUM_TASKS"},
      {{{"SLURM_STEP_ID", "0"}, {"SLURM_NTASKS", "8"}}, 8, "SLURM_NTASKS"},
      {{{"SLURM_STEP_ID", "0"}, {"SLURM_NPROCS", "8"}}, 8, "SLURM_NPROCS"},
      // A batch script, or a shell in an allocation: nothing was started eight times.
      {{{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}, 1, ""},
      // srun of one task inside a larger job.
      {{{"SLURM_STEP_ID", "3"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_NTASKS", "8"}},
       1,
       "SLURM_STEP_NUM_TASKS"},
      // mpirun's daemons are a step of their own, one a node.
      {{{"OMPI_COMM_WORLD_SIZE", "16"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}},
       16,
       "OMPI_COMM_WORLD_SIZE"},
      {{{"OMPI_COMM_WORLD_SIZE", "1"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}},
       1,
       "OMPI_COMM_WORLD_SIZE"},
      {{{"PMIX_RANK", "3"}}, 4, "PMIX_RANK"},
      {{{"PMIX_RANK", "0"}}, 1, ""},
      {{{"PMI_SIZE", "many"}}, 1, ""},
      {{{"PMI_SIZE", "4x"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}},
       2,
       "SLURM_STEP_NUM_TASKS"},
  };
  for (const auto& c : cases) {
    const Launch launch = launch_with(c.variables);
    std::string text;
    for (const auto& [name, value] : c.variables) text += name + "=" + value + " ";
    EXPECT_EQ(launch.processes, c.processes) << text;
    EXPECT_EQ(launch.variable, c.variable) << text;
  }
}

const std::string kRecipe = std::string(kTinyModel) + R"(stages:
  - pretrain:
      steps: 1
      batch: {tokens: 256, micro_sequences: 2, length: 32}
      data: [{kind: sums}]
)";

TEST(Launch, copies_of_one_rank_are_refused_before_anything_is_written) {
  const ScratchFolder folder;
  write_inputs(folder.path(), kRecipe);
  for (const Environment& variables :
       {Environment{{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}},
        Environment{{"PMI_SIZE", "2"}, {"PMI_RANK", "0"}}, Environment{{"OMPI_COMM_WORLD_SIZE", "2"}}}) {
    const Exit exit = run_binary(folder.path(), train_args(), variables);
    EXPECT_EQ(exit.code, 2) << exit.errors;
    EXPECT_NE(exit.errors.find("the launcher started 2 processes (" +
                               std::string(variables.size() == 1 ? "OMPI" : "")),
              std::string::npos)
        << exit.errors;
    EXPECT_NE(exit.errors.find("but MPI connects 1: each would run the same job"), std::string::npos)
        << exit.errors;
    EXPECT_FALSE(std::filesystem::exists(folder / "run"));
  }
}

TEST(Launch, one_process_in_a_job_of_many_trains_alone) {
  const ScratchFolder folder;
  write_inputs(folder.path(), kRecipe);
  const Environment job = {{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}};
  EXPECT_EQ(run_binary(folder.path(), train_args(), job).code, 0);
  Environment step = job;
  step["SLURM_STEP_ID"] = "0";
  step["SLURM_STEP_NUM_TASKS"] = "8";
  const Exit exit = run_ranks(1, folder.path(), train_args({"--set", "run.dir=two"}), step);
  EXPECT_EQ(exit.code, 0) << exit.errors;
}

TEST(Launch, a_signal_to_mpirun_reaches_the_ranks_and_their_exit_code_comes_back) {
  if (!mpirun_passes_signals_on()) GTEST_SKIP() << "this mpirun does not pass SIGUSR1 on";
  const ScratchFolder folder;
  write_inputs(folder.path(), kRecipe);
  Process job(folder.path(), ranks_command(2, train_args({"--set", "stages.0.pretrain.steps=100000"})));
  ASSERT_TRUE(wait_until([&] { return count_steps(folder / "run", "pretrain") > 0; }));
  job.signal(SIGUSR1);
  const Exit exit = job.wait();
  EXPECT_EQ(exit.code, 75) << exit.errors;
  EXPECT_EQ(checkpoints_of(folder / "run").size(), 1u);
}

}  // namespace
}  // namespace fp4t::test
