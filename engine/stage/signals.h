// Stop requests: SIGTERM, SIGINT, SIGUSR1, SIGUSR2 set a flag; the loops look at it between updates.
#pragma once

namespace fp4t {

// Installs the handlers; a second SIGINT ends the process at once. A file size limit (SIGXFSZ) and a pipe
// that nobody reads any more (SIGPIPE) are left to show as errors of write(), like a full disk.
void install_stop_handlers();
// Number of the signal that asked to stop, 0 when none did.
int stop_requested();
// For tests.
void clear_stop_request();

}  // namespace fp4t
