#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "engine/metrics/metrics.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

// Length of the well-formed UTF-8 character at `at`, 0 when there is none.
size_t utf8_length(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned first = byte(at);
  const size_t length = first < 0x80                    ? 1
                        : first >= 0xC2 && first < 0xE0 ? 2
                        : (first & 0xF0) == 0xE0        ? 3
                        : first >= 0xF0 && first < 0xF5 ? 4
                                                        : 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
  }
  return length;
}

// What a model writes can hold any byte: control characters and ill-formed UTF-8 become "?".
std::string printable(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_length(text, at);
    const auto c = static_cast<unsigned char>(text[at]);
    if (length == 0 || (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F) {
      out += '?';
      ++at;
    } else {
      out.append(text, at, length);
      at += length;
    }
  }
  return out;
}

}  // namespace

struct Console::Impl {
  spdlog::logger logger;
  bool terminal;
  bool status_shown = false;
  std::chrono::steady_clock::time_point last_output = std::chrono::steady_clock::now();

  Impl(const std::string& run_dir, Screen kind)
      : logger("fp4train"), terminal(kind == Screen::kFound && ::isatty(STDOUT_FILENO) != 0) {
    const auto screen = std::make_shared<spdlog::sinks::stdout_sink_st>();
    screen->set_pattern("%v");
    const auto file = std::make_shared<spdlog::sinks::basic_file_sink_st>(run_dir + "/log.txt");
    file->set_pattern("%Y-%m-%d %H:%M:%S %l %v");
    logger.sinks() = {screen, file};
    logger.flush_on(spdlog::level::info);
  }

  void clear_status() {
    if (status_shown) std::fputs("\r\033[K", stdout);
    status_shown = false;
    last_output = std::chrono::steady_clock::now();
  }
};

Console::Console(const std::string& run_dir, Screen screen) {
  make_run_folder(run_dir);
  try {
    impl_ = std::make_unique<Impl>(run_dir, screen);
  } catch (const spdlog::spdlog_ex& e) {
    throw SaveError(e.what());
  }
}

Console::Console() = default;
Console::~Console() = default;

void Console::line(const std::string& text) {
  if (!impl_) return;
  impl_->clear_status();
  impl_->logger.info("{}", printable(text));
}

void Console::warn(const std::string& text) {
  if (!impl_) return;
  impl_->clear_status();
  impl_->logger.warn("{}", printable("warning: " + text));
}

void Console::status(const std::string& text) {
  if (!impl_) return;
  if (impl_->terminal) {
    std::fprintf(stdout, "\r\033[K%s", text.c_str());
    std::fflush(stdout);
    impl_->status_shown = true;
    return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (now - impl_->last_output < std::chrono::seconds(10)) return;
  impl_->last_output = now;
  std::fprintf(stdout, "%s\n", text.c_str());
  std::fflush(stdout);
}

}  // namespace fp4t
