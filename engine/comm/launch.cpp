#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "engine/comm/mpi.h"

namespace fp4t {

int launched_processes(std::string* variable) {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}) {
    const char* value = std::getenv(name);
    const int n = value ? std::atoi(value) : 0;
    if (n > 1) {
      *variable = name;
      return n;
    }
  }
  return 1;
}

std::unique_ptr<Communicator> make_communicator() {
  std::string variable;
  const int processes = launched_processes(&variable);
  // MPI costs a helper process and a tenth of a second where no launcher prepared it.
  if (processes == 1) return make_single();
  const std::string started =
      detail::concat("the launcher started ", processes, " processes (", variable, ")");
  if (!built_with_mpi()) {
    throw RecipeError(started + ", but this program was built without MPI; start one process");
  }
  auto comm = make_mpi();
  if (comm->size() != processes) {
    throw RecipeError(detail::concat(started, ", but MPI connects ", comm->size(),
                                     ": each would run the same job. Start them by mpirun, or by srun "
                                     "--mpi=pmix with a matching plug-in"));
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
