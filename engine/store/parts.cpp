#include "engine/store/parts.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

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
      FP4T_CHECK(it != parts_.end() && it->name == name, "no part of tensor '", printable(name), "'");
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
  const Piece mine = {place.first * element, place.sent ? part.view.bytes() : 0};
  std::vector<Piece> pieces(ranks);
  comm_.all_gather(&mine, pieces.data(), sizeof(Piece));
  std::vector<int64_t> send(ranks, 0), receive(ranks, 0);
  send[0] = mine.bytes;
  std::vector<uint8_t> bytes(static_cast<size_t>(mine.bytes));
  if (mine.bytes > 0) queue_.copy_to_host(bytes.data(), part.view.data, mine.bytes);
  if (comm_.rank() != 0) {
    comm_.all_to_all(bytes.data(), send, nullptr, receive);
    return;
  }
  for (size_t r = 0; r < ranks; ++r) receive[r] = pieces[r].bytes;
  std::vector<size_t> order(ranks);  // of the pieces in the whole
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(pieces[a].first, pieces[a].bytes) < std::pair(pieces[b].first, pieces[b].bytes);
  });
  int64_t next = 0;
  for (const size_t r : order) {
    if (pieces[r].bytes == 0) continue;
    FP4T_CHECK_EQ(pieces[r].first, next, "begin of the part of '", part.name, "' on rank ", r, ", in bytes");
    next += pieces[r].bytes;
  }
  FP4T_CHECK_EQ(next, place.whole.elements() * element, "bytes of '", part.name, "' on all ranks");
  std::vector<uint8_t> arrived(static_cast<size_t>(next));
  comm_.all_to_all(bytes.data(), send, arrived.data(), receive);
  const uint8_t* from = arrived.data();
  for (const Piece& p : pieces) {
    if (p.bytes > 0) std::memcpy(static_cast<uint8_t*>(host) + p.first, from, static_cast<size_t>(p.bytes));
    from += p.bytes;
  }
}

}  // namespace fp4t
