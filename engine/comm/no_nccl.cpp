#include "engine/comm/device.h"

namespace fp4t {

bool built_with_nccl() { return false; }
bool nccl_shares_gpus() { return false; }

std::unique_ptr<Communicator> make_nccl(Communicator&, Queue&) {
  throw RecipeError("this program was built without NCCL (parallel.transport: host works)");
}

}  // namespace fp4t
