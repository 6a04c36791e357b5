#include <algorithm>
#include <cstdio>

#include "app/command.h"
#include "engine/stage/convert.h"

namespace fp4t {

int cmd_export(const AppOptions& options) {
  ExportRequest request;
  request.checkpoint = options.checkpoint;
  request.to = options.to;
  request.table = options.export_table;
  request.preset = options.preset;
  request.calibrate = options.calibrate;
  const auto* layout = std::find(std::begin(kExportLayouts), std::end(kExportLayouts), options.format);
  request.options.layout = static_cast<ExportLayout>(layout - std::begin(kExportLayouts));
  request.options.numbers = options.numbers == "fp32"   ? NumberType::kF32
                            : options.numbers == "bf16" ? NumberType::kBf16
                                                        : NumberType::kExact;
  request.options.shard_bytes = static_cast<int64_t>(options.shard_bytes);
  request.options.source = options.tokenizer;
  request.options.replace = options.replace;
  std::fputs(export_checkpoint(request).c_str(), stdout);
  return 0;
}

}  // namespace fp4t
