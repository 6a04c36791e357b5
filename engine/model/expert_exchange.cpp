#include "engine/model/expert_exchange.h"

#include <algorithm>

#include "kernels/ops/run.h"

namespace fp4t {

namespace {

std::vector<int64_t> bytes_of(const std::vector<int64_t>& rows, int64_t row_bytes) {
  std::vector<int64_t> bytes = rows;
  for (int64_t& n : bytes) n *= row_bytes;
  return bytes;
}

// On a GPU the device stands still while the host decides where tokens go; on the CPU the cores are the
// ranks'.
int threads_for(const Queue& queue, const Communicator& comm, const Plan& plan) {
  constexpr int kMost = 8;
  if (plan.axes.expert == 1 || queue.backend() == Backend::kCpu) return 1;
  const int threads = threads_of_rank(plan.run.threads, comm);
  return threads > 0 ? std::min(kMost, threads) : kMost;  // 0: all of the host's
}

int64_t row_bytes_of(const TensorView& t) { return t.dim(1) * dtype_bytes(t.dtype); }

}  // namespace

ExpertExchange::ExpertExchange(Queue& queue, Communicator& comm, const Plan& plan)
    : queue_(queue),
      aside_(queue, plan.axes.expert > 1),
      plan_(plan),
      dims_(dims_of(plan)),
      threads_(threads_for(queue, comm, plan)) {
  sizes_ = {0, dims_.top_k, dims_.experts, dims_.expert_ranks, dims_.expert_chunks};
  if (!dims_.spreads_experts()) return;
  group_ = comm.split(static_cast<int>(plan.axes.data_index(comm.rank())), comm.rank());
  FP4T_CHECK_EQ(static_cast<int64_t>(group_->size()), plan.axes.expert, "ranks of an expert group");
  FP4T_CHECK_EQ(static_cast<int64_t>(group_->rank()), plan.axes.expert_index(comm.rank()));
  if (queue.backend() == Backend::kCuda) {
    tensors_ = make_on_device(*group_, aside_.queue(), transport_of(plan));
  }
}

ExpertExchange::Begun ExpertExchange::begin(const TensorView& choices, uint32_t sample_id) {
  TripSizes sizes = sizes_;
  sizes.tokens = choices.dim(0);
  Begun begun;
  begun.choices = queue_.download(choices.data, choices.bytes()).values<int32_t>();
  const auto ranks = static_cast<size_t>(sizes.ranks), chunks = static_cast<size_t>(sizes.chunks);
  // The layer's one message of counts, and with it the sample id: for every rank id, rows, tokens by chunk.
  const size_t width = 2 + chunks;
  std::vector<int64_t> mine, all(ranks * ranks * width);
  const int64_t id = sizes.tokens > 0 ? int64_t{sample_id} : int64_t{UINT32_MAX};
  std::vector<Visit> visits = list_visits(sizes, begun.choices.data(), threads_);
  for (const TripCounts& counts : count_trip(sizes, visits)) {
    mine.push_back(id);
    mine.push_back(counts.rows);
    mine.insert(mine.end(), counts.tokens.begin(), counts.tokens.end());
  }
  group_->all_gather(mine.data(), all.data(), static_cast<int64_t>(mine.size() * sizeof(int64_t)));
  std::vector<TripCounts> matrix;
  int64_t smallest = id, travelling = 0;
  for (size_t i = 0; i < ranks * ranks; ++i) {
    const int64_t* said = all.data() + i * width;
    smallest = std::min(smallest, said[0]);
    matrix.push_back({said[1], {said + 2, said + width}});
    if (i / ranks != i % ranks) travelling += matrix.back().all_tokens();
  }
  sizes.chunks = call_chunks(plan_, dims_, static_cast<double>(travelling) / static_cast<double>(ranks));
  if (sizes.chunks != sizes_.chunks) {
    for (TripCounts& counts : matrix) counts.tokens = {counts.all_tokens()};
    for (Visit& v : visits) v.first_chunk = v.last_chunk = 0;
  }
  begun.chunks = sizes.chunks;
  begun.sample_id = static_cast<uint32_t>(smallest);
  begun.trip = plan_trip(sizes, visits, matrix, group_->rank(), dims_.round_rows);
  hear_of_rounds(matrix, begun.trip.rounds);
  return begun;
}

void ExpertExchange::hear_of_rounds(const std::vector<TripCounts>& matrix, std::vector<Trip::Round>& rounds) {
  const auto ranks = static_cast<size_t>(sizes_.ranks), own = static_cast<size_t>(group_->rank());
  std::vector<int64_t> said, heard;
  if (rounds.size() == 1) {  // all that comes, comes at once
    for (size_t from = 0; from < ranks; ++from) {
      const std::vector<int64_t>& tokens = matrix[from * ranks + own].tokens;
      heard.insert(heard.end(), tokens.begin(), tokens.end());
    }
  } else {
    // Which tokens a round takes depends on the rows of each, so the senders say it.
    for (size_t to = 0; to < ranks; ++to) {
      for (const Trip::Round& round : rounds) {
        for (const Trip::Flow& flow : round.there) said.push_back(flow.send[to]);
      }
    }
    heard.resize(said.size());
    const std::vector<int64_t> bytes(ranks, static_cast<int64_t>(said.size() / ranks * sizeof(int64_t)));
    group_->all_to_all(said.data(), bytes, heard.data(), bytes);
  }
  const int64_t* next = heard.data();
  for (size_t from = 0; from < ranks; ++from) {
    for (Trip::Round& round : rounds) {
      for (Trip::Flow& flow : round.there) {
        flow.receive[from] = *next++;
        round.receive[from] += flow.receive[from];
      }
    }
  }
}

GuestRows ExpertExchange::bring_choices(const Begun& begun, Trip::Round& round, int32_t absent) {
  const auto k = static_cast<size_t>(sizes_.top_k);
  std::vector<int32_t> sent, guests(static_cast<size_t>(round.num_guests()) * k);
  sent.reserve(static_cast<size_t>(round.num_sent()) * k);
  for (int64_t i = 0; i < round.num_sent(); ++i) {
    const auto token = static_cast<size_t>(begun.trip.tokens[static_cast<size_t>(round.first + i)]);
    const auto first = begun.choices.begin() + static_cast<int64_t>(token * k);
    sent.insert(sent.end(), first, first + sizes_.top_k);
  }
  const int64_t bytes = sizes_.top_k * static_cast<int64_t>(sizeof(int32_t));
  group_->all_to_all(sent.data(), bytes_of(round.send, bytes), guests.data(), bytes_of(round.receive, bytes));
  TripSizes sizes = sizes_;
  sizes.tokens = round.num_guests();
  sizes.chunks = begun.chunks;
  GuestRows placed = place_guests(sizes, guests.data(), round.receive, group_->rank(), absent, threads_);
  for (size_t c = 0; c < placed.chunks.size(); ++c) {
    FP4T_CHECK(round.there[c].receive == placed.chunks[c].come, "guests of chunk ", c);
    round.back[c].send = placed.chunks[c].leave;
  }
  return placed;
}

void ExpertExchange::bring(const Trip::Round& round, const std::vector<Field>& fields,
                           const TensorView& tokens) {
  const int64_t count = round.num_sent();
  std::vector<Rows> rows;
  for (const Field& f : fields) {
    const int64_t bytes = row_bytes_of(f.field);
    FP4T_CHECK_EQ(row_bytes_of(f.sent), bytes, "bytes of a row that is sent");
    FP4T_CHECK_EQ(row_bytes_of(f.out), bytes, "bytes of a row that arrives");
    FP4T_CHECK(round.num_guests() <= f.out.dim(0), round.num_guests(), " guests, room for ", f.out.dim(0));
    if (count > 0) {
      const TensorView to = {f.sent.data, f.field.dtype, {count, f.field.dim(1)}};
      run(queue_, PermuteRows{.x = f.field, .token_of = tokens.rows(round.first, count), .out = to});
    }
    rows.push_back({static_cast<char*>(f.sent.data), static_cast<char*>(f.out.data), bytes});
  }
  aside_.begin();
  for (const Trip::Flow& flow : round.there) {
    exchange(flow, rows);
    for (Rows& r : rows) {
      r.from += flow.num_sent() * r.bytes;
      r.to += flow.num_received() * r.bytes;
    }
  }
}

void ExpertExchange::await(int64_t chunk) {
  for (; awaited_ <= static_cast<size_t>(chunk); ++awaited_) {
    calls_[awaited_]->wait();
    queue_.wait_for(marks_[awaited_]);
  }
}

void ExpertExchange::bring_back(const Trip::Round& round, int64_t chunk, const std::vector<Sums>& sums) {
  int64_t left = 0, came = round.first;
  for (int64_t c = 0; c < chunk; ++c) {
    left += round.back[static_cast<size_t>(c)].num_sent();
    came += round.back[static_cast<size_t>(c)].num_received();
  }
  std::vector<Rows> rows;
  for (const Sums& s : sums) {
    const int64_t bytes = row_bytes_of(s.guests);
    FP4T_CHECK_EQ(row_bytes_of(s.returned), bytes, "bytes of a row that returns");
    rows.push_back({static_cast<char*>(s.guests.data) + left * bytes,
                    static_cast<char*>(s.returned.data) + came * bytes, bytes});
  }
  aside_.begin();
  exchange(round.back[static_cast<size_t>(chunk)], rows);
}

void ExpertExchange::finish() {
  if (calls_.empty()) return;
  for (; awaited_ < calls_.size(); ++awaited_) calls_[awaited_]->wait();
  aside_.end();
  calls_.clear();
  marks_.clear();
  awaited_ = 0;
}

void ExpertExchange::exchange(const Trip::Flow& flow, const std::vector<Rows>& rows) {
  std::vector<Part> send, receive;
  for (const Rows& r : rows) {
    const auto list = [&](char* next, const std::vector<int64_t>& counts, std::vector<Part>& parts) {
      for (size_t rank = 0; rank < counts.size(); ++rank) {
        parts.push_back({static_cast<int>(rank), next, counts[rank] * r.bytes});
        next += parts.back().bytes;
      }
    };
    list(r.from, flow.send, send);
    list(r.to, flow.receive, receive);
  }
  calls_.push_back((tensors_ ? *tensors_ : *group_).begin_exchange(send, receive));
  marks_.push_back(aside_.mark());
}

}  // namespace fp4t
