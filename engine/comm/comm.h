// Collectives over the ranks of a run: the one virtual interface (DESIGN.md section 6). Coarse calls;
// buffers are host pointers. One rank: every call is the identity.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fp4t {

enum class ReduceOp : uint8_t { kSum, kMax };

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual void barrier() = 0;
  virtual void all_reduce(double* values, int64_t n, ReduceOp op) = 0;
  virtual void all_reduce(float* values, int64_t n, ReduceOp op) = 0;
  // out[r * n .. ) gets rank r's in[0 .. n).
  virtual void all_gather(const void* in, void* out, int64_t bytes_per_rank) = 0;
  virtual void reduce_scatter(const float* in, float* out, int64_t n_per_rank) = 0;
  virtual void all_to_all(const void* in, const std::vector<int64_t>& send_bytes, void* out,
                          const std::vector<int64_t>& receive_bytes) = 0;
  virtual void broadcast(void* data, int64_t bytes, int root) = 0;
  // Ranks of equal colour form a new communicator, ordered by key.
  virtual std::unique_ptr<Communicator> split(int colour, int key) = 0;
};

std::unique_ptr<Communicator> make_single();

// Number of processes that a launcher says it started (OMPI_COMM_WORLD_SIZE, PMI_SIZE, SLURM_NTASKS), 1
// without one; `variable` gets its name.
int launched_processes(std::string* variable);

}  // namespace fp4t
