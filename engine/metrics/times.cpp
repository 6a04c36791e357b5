#include "engine/metrics/times.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/metrics/metrics.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

TimesWriter::TimesWriter(const std::string& run_dir, int64_t keep_lines)
    : path_(run_dir + "/times.jsonl"), start_(std::chrono::steady_clock::now()) {
  std::string kept;
  std::ifstream in(path_, std::ios::binary);
  for (std::string line; keep_lines > 0 && std::getline(in, line);) {
    const auto object = nlohmann::json::parse(line, nullptr, false);
    if (!object.is_object() || !object.contains("line") || !object.contains("seconds")) continue;
    if (!object["line"].is_number() || !object["seconds"].is_number()) continue;
    if (object["line"].get<double>() > static_cast<double>(keep_lines)) continue;
    earlier_ = std::max(earlier_, object["seconds"].get<double>());
    kept += line + "\n";
  }
  in.close();
  write_text_file(path_, kept);
  file_.reset(std::fopen(path_.c_str(), "ab"));
  if (!file_) throw SaveError(detail::concat("cannot write ", printable(path_), ": ", std::strerror(errno)));
}

void TimesWriter::add(int64_t line) {
  const std::chrono::duration<double> now = std::chrono::steady_clock::now() - start_;
  const bool good = std::fprintf(file_.get(), "{\"line\":%ld,\"seconds\":%.3f}\n", static_cast<long>(line),
                                 earlier_ + now.count()) > 0 &&
                    std::fflush(file_.get()) == 0;
  if (!good) throw SaveError(detail::concat("cannot write ", printable(path_), ": ", std::strerror(errno)));
}

}  // namespace fp4t
