#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "engine/comm/mpi.h"

namespace fp4t {

namespace {

// What was started, and the variable that says so.
struct Launch {
  int processes = 1;
  std::string variable;
};

std::optional<int> number_in(const char* variable) {
  const char* text = std::getenv(variable);
  if (!text) return std::nullopt;
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [at, error] = std::from_chars(text, end, value);
  if (error != std::errc() || at != end || value < 0) return std::nullopt;
  return value;
}

// Of mpirun (Open MPI), mpiexec (MVAPICH; Hydra, and srun --mpi=pmi2), srun. The first that is set decides,
// with a 1 too: what a launcher started may stand inside another one's job. SLURM_NTASKS alone says what the
// job may start, not what was started; without the number of the step's tasks it is taken for that.
Launch by_sizes() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (const auto n = number_in(name)) return {std::max(*n, 1), name};
  }
  if (!std::getenv("SLURM_STEP_ID")) return {};
  for (const char* name : {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"}) {
    if (const auto n = number_in(name)) return {std::max(*n, 1), name};
  }
  return {};
}

}  // namespace

int launched_processes(std::string* variable) {
  Launch launch = by_sizes();
  // A PMIx server says which process this is, and not of how many.
  const auto rank = launch.variable.empty() ? number_in("PMIX_RANK") : std::nullopt;
  if (rank.value_or(0) > 0) launch = {*rank + 1, "PMIX_RANK"};
  *variable = launch.variable;
  return launch.processes;
}

std::unique_ptr<Communicator> make_communicator() {
  std::string variable;
  const int processes = launched_processes(&variable);
  // MPI costs a helper process and a tenth of a second where no launcher prepared it.
  if (processes == 1) return make_single();
  const bool at_least = variable == "PMIX_RANK";
  const std::string started = detail::concat("the launcher started ", at_least ? "at least " : "", processes,
                                             " processes (", variable, ")");
  if (!built_with_mpi()) {
    throw RecipeError(started + ", but this program was built without MPI; start one process");
  }
  auto comm = make_mpi();
  if (comm->size() < processes) {
    throw RecipeError(
        detail::concat(started, ", but MPI connects ", comm->size(),
                       ": each would run the same job. Start them by mpirun, or by srun "
                       "--mpi=pmix with a matching plug-in (srun --mpi=list names those there are)"));
  }
  return comm;
}

int threads_of_rank(int64_t requested, const Communicator& comm) {
  if (requested > 0) return static_cast<int>(requested);
  if (comm.local_size() == 1) return 0;
  cpu_set_t set;
  CPU_ZERO(&set);
  const int bound = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  const auto online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return std::max(1, std::min(bound, online / comm.local_size()));
}

}  // namespace fp4t
