#include <cstdio>

#include "app/command.h"
#include "engine/stage/selfcheck.h"
#include "kernels/base/text.h"

namespace fp4t {

int cmd_selfcheck(const AppOptions& options) {
  const Machine machine = probe_machine(options.device, 0);
  Queue queue = machine.backend == Backend::kCuda ? Queue::cuda(0) : Queue::cpu(machine.num_threads);
  const GoldenResult result = check_golden(queue, options.golden);
  for (const std::string& failure : result.failures) std::printf("%s\n", printable_lines(failure).c_str());
  std::printf("%ld cases, %ld equal\n", static_cast<long>(result.cases), static_cast<long>(result.equal));
  return result.cases > 0 && result.cases == result.equal ? 0 : 1;
}

}  // namespace fp4t
