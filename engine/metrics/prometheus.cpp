#include "engine/metrics/prometheus.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// Of metric names [a-zA-Z0-9_] is left; none begins with a digit, as they have a prefix.
std::string metric_name(const std::string& key) {
  std::string name;
  for (const char c : key) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
    name += plain ? c : '_';
  }
  return name;
}

// Backslashes, quotes and line feeds of a label's value; `quotes` not in help texts.
std::string escaped(const std::string& text, bool quotes) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '"' && quotes) {
      out += "\\\"";
    } else {
      out += c;
    }
  }
  return out;
}

std::string label(const char* name, const std::string& value) {
  return std::string(name) + "=\"" + escaped(value, true) + "\"";
}

std::string value_text(double v) {
  if (std::isnan(v)) return "NaN";
  if (std::isinf(v)) return v > 0 ? "+Inf" : "-Inf";
  char text[40];
  std::snprintf(text, sizeof(text), "%.10g", v);
  return text;
}

}  // namespace

void PrometheusFile::check_place(const std::string& path) {
  const auto refuse = [&](int reason) {
    throw SaveError(detail::concat("cannot write ", printable(path), ": ", std::strerror(reason)));
  };
  // Written as write() does it, up to the rename.
  const std::string temporary = path + ".tmp";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(temporary.c_str(), "wb"),
                                                             std::fclose);
  if (!file || std::remove(temporary.c_str()) != 0) refuse(errno);
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) refuse(EISDIR);
}

PrometheusFile::PrometheusFile(const std::string& path, const std::string& run) : path_(path), run_(run) {
  write();
}

void PrometheusFile::set(const std::string& name, const char* type, const std::string& help,
                         const std::string& labels, double value) {
  Family& family = families_[name];
  family.type = type;
  family.help = help;
  family.samples[labels] = value;
}

void PrometheusFile::update(const std::string& kind, const std::string& stage, int64_t step,
                            const MetricsRecord& record, double unix_seconds) {
  const std::string labels = label("run", run_) + "," + label("stage", stage);
  const bool is_step = kind == "step";
  for (const auto& [key, value] : record.numbers) {
    if (is_step && key == "tokens") {
      set("fp4train_tokens_total", "counter", "Trained tokens of the run.", label("run", run_), value);
      continue;
    }
    const size_t dot = key.find('.');
    const std::string name =
        std::string("fp4train_") + (is_step ? "" : metric_name(kind) + "_") + metric_name(key.substr(0, dot));
    const std::string of = dot == std::string::npos ? "" : "," + label("of", key.substr(dot + 1));
    set(name, "gauge", "'" + key.substr(0, dot) + "' of the newest " + kind + " line of metrics.jsonl.",
        labels + of, value);
  }
  if (is_step) {
    set("fp4train_steps_total", "counter", "Finished steps of the stage.", labels, static_cast<double>(step));
  }
  set("fp4train_last_update_timestamp_seconds", "gauge", "When this file was written.", label("run", run_),
      unix_seconds);
  write();
}

std::string PrometheusFile::text() const {
  std::string out;
  for (const auto& [name, family] : families_) {
    out +=
        "# HELP " + name + " " + escaped(family.help, false) + "\n# TYPE " + name + " " + family.type + "\n";
    for (const auto& [labels, value] : family.samples)
      out += name + "{" + labels + "} " + value_text(value) + "\n";
  }
  return out;
}

void PrometheusFile::write() const {
  const std::string temporary = path_ + ".tmp", all = text();
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(temporary.c_str(), "wb"), std::fclose);
  bool good = file && std::fwrite(all.data(), 1, all.size(), file.get()) == all.size();
  good = file && std::fclose(file.release()) == 0 && good;
  if (good && std::rename(temporary.c_str(), path_.c_str()) == 0) return;
  throw SaveError(
      detail::concat("cannot write ", printable(path_), " (run.prometheus): ", std::strerror(errno)));
}

}  // namespace fp4t
