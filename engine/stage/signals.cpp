#include "engine/stage/signals.h"

#include <csignal>
#include <initializer_list>

namespace fp4t {

namespace {
volatile std::sig_atomic_t g_signal = 0;  // the one global: a handler can reach nothing else

void on_signal(int number) {
  if (g_signal != 0 && number == SIGINT) {
    std::signal(number, SIG_DFL);
    std::raise(number);
  }
  g_signal = number;
}
}  // namespace

void install_stop_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (int number : {SIGTERM, SIGINT, SIGUSR1, SIGUSR2}) sigaction(number, &action, nullptr);
  for (int number : {SIGXFSZ, SIGPIPE}) std::signal(number, SIG_IGN);
}

int stop_requested() { return g_signal; }

void clear_stop_request() { g_signal = 0; }

}  // namespace fp4t
