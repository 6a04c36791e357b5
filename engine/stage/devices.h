// What each rank of a run computes on: of the GPUs of its host one of its own.
#pragma once

#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/recipe/recipe.h"
#include "kernels/base/queue.h"

namespace fp4t {

// What a rank has to choose from.
struct RankDevices {
  std::string host;
  std::vector<std::string> gpus;  // ids of the GPUs that this process sees, in its numbering
};

// The GPU of each rank, in that rank's numbering: the first that it sees and no rank before it has, so that
// it does not matter whether a launcher shows a rank one GPU or all. With `shared` GPUs, ranks of one host
// take turns instead. Throws RecipeError that names the first host with more ranks than GPUs.
std::vector<int> choose_gpus(const std::vector<RankDevices>& ranks, bool shared);

// Where a rank runs, and what it has there, in words.
struct RankPlace {
  std::string host, machine;
};

// What to tell when machines differ, or the number of ranks on their hosts: every kind with its first rank;
// "" when all are alike.
std::string unevenness(const std::vector<RankPlace>& ranks);

// This rank's machine; the same is thrown on every rank. `notes` gets what is uneven among them. Where ranks
// share a GPU, each has its part of the memory.
Machine machine_of_rank(const Recipe& recipe, Communicator& comm, std::vector<std::string>& notes);

}  // namespace fp4t
