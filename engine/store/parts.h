// Tensors of which a rank holds a part. A checkpoint knows whole, logical tensors alone: rank 0 gathers one
// after another while it writes, and every rank takes its part of what it reads.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "kernels/base/queue.h"
#include "kernels/base/tensor.h"

namespace fp4t {

struct TensorPart {
  Shape whole;
  int64_t first = 0;  // element of the whole at which this rank's part begins
  bool sent = true;   // false: another rank has the same part, and sends it
};

// By tensor name; the same names on every rank, also where a rank's part is empty. What is sent makes up the
// whole, whichever rank has which part.
using TensorParts = std::map<std::string, TensorPart>;

// Writes the whole tensor of a name to host memory.
using FetchWhole = std::function<void(const std::string& name, void* host)>;

class PartGather {
 public:
  // `tensors` holds every part's view.
  PartGather(Queue& queue, Communicator& comm, const std::vector<NamedTensor>& tensors,
             const TensorParts& parts);

  // Rank 0: `body` may fetch, in any order, while the other ranks serve. What it throws is thrown there
  // alone, after the others were released.
  void lead(const std::function<void(const FetchWhole&)>& body);
  // The other ranks: until rank 0 is done.
  void serve();

 private:
  void exchange(size_t index, void* host);

  Queue& queue_;
  Communicator& comm_;
  std::vector<NamedTensor> parts_;  // sorted by name
  const TensorParts& places_;
};

}  // namespace fp4t
