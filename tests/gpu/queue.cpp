// The device side of a queue, where its calls fail.
#include "kernels/base/queue.h"

#include "kernels/base/check.h"
#include "tests/support/gpu_main.h"

namespace fp4t {
namespace {

TEST(GpuQueue, what_spoils_a_recording_is_told_and_the_queue_goes_on) {
  Queue queue = Queue::cuda(0);
  std::string told;
  try {
    queue.record([&] { queue.synchronize(); });  // nothing may wait there
  } catch (const Error& e) {
    told = e.what();
  }
  EXPECT_NE(told.find("cudaStreamSynchronize"), std::string::npos) << told;
  const int32_t sent = 7;
  int32_t received = 0;
  auto* const there = static_cast<int32_t*>(queue.allocate(2 * sizeof(sent)));
  queue.copy_from_host(there, &sent, sizeof(sent));
  const Recording copies = queue.record([&] { queue.copy(there + 1, there, sizeof(sent)); });
  queue.replay(copies);
  queue.copy_to_host(&received, there + 1, sizeof(received));
  queue.release(there);
  EXPECT_EQ(received, sent);
}

}  // namespace
}  // namespace fp4t

FP4T_GPU_TEST_MAIN
