#include <cstdio>

#include "app/command.h"
#include "engine/metrics/metrics.h"

namespace fp4t {

int cmd_report(const AppOptions& options) {
  write_report(options.run_dir);
  std::printf("%s/report.html\n", options.run_dir.c_str());
  return 0;
}

}  // namespace fp4t
