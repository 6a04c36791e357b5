#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "engine/metrics/metrics.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

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
    throw SaveError(printable(e.what()));
  }
}

Console::Console() = default;
Console::~Console() = default;

void Console::line(const std::string& text) {
  if (!impl_) return;
  impl_->clear_status();
  impl_->logger.info("{}", printable_lines(text));
}

void Console::warn(const std::string& text) {
  if (!impl_) return;
  impl_->clear_status();
  impl_->logger.warn("{}", printable_lines("warning: " + text));
}

void Console::status(const std::string& text) {
  if (!impl_) return;
  if (impl_->terminal) {
    std::fprintf(stdout, "\r\033[K%s", printable(text).c_str());
    std::fflush(stdout);
    impl_->status_shown = true;
    return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (now - impl_->last_output < std::chrono::seconds(10)) return;
  impl_->last_output = now;
  std::fprintf(stdout, "%s\n", printable(text).c_str());
  std::fflush(stdout);
}

}  // namespace fp4t
