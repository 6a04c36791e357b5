#include "engine/metrics/metrics.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <sstream>

#include "engine/metrics/json_line.h"
#include "engine/metrics/tensorboard.h"
#include "engine/metrics/times.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN or Inf; they become texts, so that no reader takes them for a missing value.
Json number(double x) {
  if (std::isfinite(x)) return x;
  return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
}

// As metrics.jsonl holds it: ill-formed UTF-8 becomes U+FFFD.
std::string well_formed(const std::string& text) {
  return Json::parse(Json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

// Cuts the file after its first `lines` lines (or where the last whole line ends, when there are fewer);
// returns how many are left.
int64_t keep_first_lines(const std::string& path, int64_t lines) {
  const auto text = read_text_file_if_there(path);
  if (!text) return 0;
  std::istringstream in(*text);
  int64_t kept = 0, bytes = 0;
  std::string line;
  while (kept < lines && std::getline(in, line) && !in.eof()) {
    bytes += static_cast<int64_t>(line.size()) + 1;
    ++kept;
    try {
      parse_metrics_line(line, path, kept);
    } catch (const BadDataError& e) {
      throw BadDataError(std::string(e.what()) + "; put it right or take it out, the run goes on without it");
    }
  }
  if (kept > 0 && ::truncate(path.c_str(), bytes) != 0) {
    throw SaveError(detail::concat("cannot cut ", printable(path), ": ", std::strerror(errno)));
  }
  return kept;
}

}  // namespace

struct MetricsWriter::Impl {
  std::FILE* file = nullptr;
  std::unique_ptr<TimesWriter> times;
  std::string dir, path;
  int64_t lines = 0;
  std::unique_ptr<TensorBoardFile> board;

  void append(const std::string& line) {
    const bool good = std::fwrite(line.data(), 1, line.size(), file) == line.size() &&
                      std::fputc('\n', file) == '\n' && std::fflush(file) == 0;
    if (!good) throw SaveError(detail::concat("cannot write ", printable(path), ": ", std::strerror(errno)));
    ++lines;
  }
  ~Impl() {
    if (file) std::fclose(file);
  }
};

MetricsWriter::MetricsWriter(const std::string& run_dir, int64_t keep_lines, const std::string& header_json)
    : impl_(std::make_unique<Impl>()) {
  make_run_folder(run_dir);
  impl_->dir = run_dir;
  impl_->path = run_dir + "/metrics.jsonl";
  const int64_t kept = keep_lines > 0 ? keep_first_lines(impl_->path, keep_lines) : 0;
  impl_->file = std::fopen(impl_->path.c_str(), kept > 0 ? "ab" : "wb");
  if (!impl_->file)
    throw SaveError(detail::concat("cannot write ", printable(impl_->path), ": ", std::strerror(errno)));
  impl_->lines = kept;
  if (kept == 0) impl_->append(header_json);
  impl_->times = std::make_unique<TimesWriter>(run_dir, kept);
}

MetricsWriter::~MetricsWriter() = default;

int64_t MetricsWriter::lines() const { return impl_->lines; }

void MetricsWriter::sync() {
  if (::fsync(::fileno(impl_->file)) == 0) return;
  throw SaveError(detail::concat("cannot sync ", printable(impl_->path), ": ", std::strerror(errno)));
}

void MetricsWriter::write(const std::string& kind, const std::string& stage, int64_t step,
                          int64_t global_step, const MetricsRecord& record) {
  Json line;
  line["kind"] = kind;
  line["stage"] = stage;
  line["step"] = step;
  std::vector<std::pair<std::string, double>> scalars;
  for (const auto& [name, value] : record.numbers) {
    line[name] = number(value);
    scalars.emplace_back(stage + "/" + (kind == "step" ? "" : kind + "/") + name, value);
  }
  std::vector<std::pair<std::string, std::string>> texts;
  for (const auto& [name, text] : record.texts) {
    line[name] = text;
    texts.emplace_back(stage + "/" + name, well_formed(text));
  }
  for (const auto& [name, values] : record.lists) {
    Json list = Json::array();
    for (double v : values) list.push_back(number(v));
    line[name] = std::move(list);
  }
  impl_->append(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  impl_->times->add(impl_->lines);
  if (!impl_->board) impl_->board = std::make_unique<TensorBoardFile>(impl_->dir + "/tensorboard");
  impl_->board->write(global_step, static_cast<double>(std::time(nullptr)), scalars, texts);
}

}  // namespace fp4t
