#include "engine/metrics/times.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>

#include "engine/metrics/metrics.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

TimesWriter::TimesWriter(const std::string& run_dir, int64_t keep_lines)
    : path_(run_dir + "/times.jsonl"), start_(std::chrono::steady_clock::now()) {
  std::string kept;
  std::istringstream in(keep_lines > 0 ? read_text_file_if_there(path_).value_or("") : "");
  for (std::string line; std::getline(in, line);) {
    const auto object = nlohmann::json::parse(line, nullptr, false);
    if (!object.is_object() || !object.contains("line") || !object.contains("seconds")) continue;
    if (!object["line"].is_number() || !object["seconds"].is_number()) continue;
    if (object["line"].get<double>() > static_cast<double>(keep_lines)) continue;
    earlier_ = std::max(earlier_, object["seconds"].get<double>());
    kept += line + "\n";
  }
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
