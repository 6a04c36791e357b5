#include "engine/store/parts.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace fp4t {

namespace {
constexpr int64_t kDone = -1;
}

PartGather::PartGather(Queue& queue, Communicator& comm, const std::vector<NamedTensor>& tensors,
                       const TensorParts& parts)
    : queue_(queue), comm_(comm), places_(parts) {
  for (const NamedTensor& t : tensors) {
    if (parts.count(t.name) != 0) parts_.push_back(t);
  }
  FP4T_CHECK_EQ(parts_.size(), parts.size(), "tensors that ranks share");
  std::sort(parts_.begin(), parts_.end(),
            [](const NamedTensor& a, const NamedTensor& b) { return a.name < b.name; });
}

void PartGather::lead(const std::function<void(const FetchWhole&)>& body) {
  const auto release = [this] {
    int64_t done = kDone;
    comm_.broadcast(&done, sizeof(done), 0);
  };
  try {
    body([this](const std::string& name, void* host) {
      const auto it =
          std::lower_bound(parts_.begin(), parts_.end(), name,
                           [](const NamedTensor& t, const std::string& wanted) { return t.name < wanted; });
      FP4T_CHECK(it != parts_.end() && it->name == name, "no part of tensor '", name, "'");
      auto index = static_cast<int64_t>(it - parts_.begin());
      comm_.broadcast(&index, sizeof(index), 0);
      exchange(static_cast<size_t>(index), host);
    });
  } catch (...) {
    release();
    throw;
  }
  release();
}

void PartGather::serve() {
  for (;;) {
    int64_t index = kDone;
    comm_.broadcast(&index, sizeof(index), 0);
    if (index == kDone) return;
    exchange(static_cast<size_t>(index), nullptr);
  }
}

void PartGather::exchange(size_t index, void* host) {
  const NamedTensor& part = parts_.at(index);
  const TensorPart& place = places_.at(part.name);
  const int64_t element = dtype_bytes(part.view.dtype);
  const auto ranks = static_cast<size_t>(comm_.size());
  struct Piece {
    int64_t first, bytes;
  };
  const Piece mine = {place.first * element, part.view.bytes()};
  std::vector<Piece> pieces(ranks);
  comm_.all_gather(&mine, pieces.data(), sizeof(Piece));
  std::vector<int64_t> send(ranks, 0), receive(ranks, 0);
  send[0] = mine.bytes;
  if (comm_.rank() == 0) {
    int64_t next = 0;  // ranks hold consecutive parts, so they arrive in place
    for (size_t r = 0; r < ranks; ++r) {
      receive[r] = pieces[r].bytes;
      FP4T_CHECK(pieces[r].bytes == 0 || pieces[r].first == next, "part of '", part.name, "' on rank ", r,
                 " begins at byte ", pieces[r].first, " instead of ", next);
      next += pieces[r].bytes;
    }
    FP4T_CHECK_EQ(next, place.whole.elements() * element, "bytes of '", part.name, "' on all ranks");
  }
  std::vector<uint8_t> bytes(static_cast<size_t>(mine.bytes));
  if (mine.bytes > 0) queue_.copy_to_host(bytes.data(), part.view.data, mine.bytes);
  comm_.all_to_all(bytes.data(), send, host, receive);
}

}  // namespace fp4t
