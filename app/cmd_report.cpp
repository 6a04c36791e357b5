#include <cstdio>

#include "app/command.h"
#include "engine/metrics/metrics.h"
#include "kernels/base/text.h"

namespace fp4t {

int cmd_report(const AppOptions& options) {
  std::string path = options.out;
  if (path.empty())
    path = options.run_dirs.size() == 1 ? options.run_dirs[0] + "/report.html" : "report.html";
  write_report(options.run_dirs, path);
  std::printf("%s\n", printable(path).c_str());
  return 0;
}

}  // namespace fp4t
