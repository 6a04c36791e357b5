#include "engine/rl/sampler.h"

#include <algorithm>

#include "engine/rl/routing.h"

namespace fp4t {

namespace {

// A sequence in flight.
struct Active {
  size_t request;
  int32_t slot;
  int64_t length;  // tokens whose keys and values are in the cache after the next decode call
  int32_t next;    // the token that the next decode call reads
};

class Batch {
 public:
  Batch(Transformer& model, const Pass& pass, const std::vector<GenerateRequest>& requests,
        const GenerateOptions& options)
      : model_(model), pass_(pass), requests_(requests), options_(options), results_(requests.size()) {
    limit_ = std::min(model.plan().max_cache_length, model.plan().model.max_positions);
    const int64_t slots = std::min(options.max_batch, model.plan().max_cache_slots);
    FP4T_CHECK(slots >= 1, "no cache slots in the plan");
    for (int64_t s = slots; s > 0; --s) free_.push_back(static_cast<int32_t>(s - 1));
  }

  std::vector<Completion> run() {
    while (next_request_ < requests_.size() || !active_.empty()) {
      admit();
      if (!active_.empty()) decode();
      if (options_.progress) options_.progress(done_, static_cast<int64_t>(requests_.size()));
    }
    Pass nobody = pass_;
    nobody.sample_id = UINT32_MAX;
    while (options_.meet && options_.meet(false)) model_.decode_and_draw(nobody, {}, {});
    return std::move(results_);
  }

 private:
  // Fills free slots with prompts, in calls of at most plan.max_decode_tokens rows, and draws their first
  // tokens.
  void admit() {
    while (next_request_ < requests_.size() && !free_.empty()) {
      Transformer::DecodeRows rows;
      std::vector<Active> fresh;
      while (next_request_ < requests_.size() && !free_.empty()) {
        const GenerateRequest& r = requests_[next_request_];
        const auto n = static_cast<int64_t>(r.prompt.size());
        FP4T_CHECK(n >= 1, "empty prompt");
        FP4T_CHECK(n <= limit_, "a prompt of ", n, " tokens; the plan has room for ", limit_);
        if (static_cast<int64_t>(rows.tokens.size()) + n > model_.plan().max_decode_tokens) break;
        const int32_t slot = free_.back();
        free_.pop_back();
        for (int64_t i = 0; i < n; ++i) {
          rows.tokens.push_back(r.prompt[static_cast<size_t>(i)]);
          rows.slots.push_back(slot);
          rows.positions.push_back(static_cast<int32_t>(i));
        }
        rows.logit_rows.push_back(static_cast<int32_t>(rows.tokens.size() - 1));
        fresh.push_back({next_request_++, slot, n, 0});
      }
      FP4T_CHECK(!fresh.empty(), "the plan's decode rows hold not even one prompt");
      step(rows, fresh);
    }
  }

  void decode() {
    Transformer::DecodeRows rows;
    std::vector<Active> current = std::move(active_);
    active_.clear();
    const auto most = static_cast<size_t>(model_.plan().max_decode_tokens);
    for (size_t begin = 0; begin < current.size(); begin += most) {
      const size_t end = std::min(current.size(), begin + most);
      rows = {};
      std::vector<Active> part(current.begin() + static_cast<int64_t>(begin),
                               current.begin() + static_cast<int64_t>(end));
      for (Active& a : part) {
        rows.tokens.push_back(a.next);
        rows.slots.push_back(a.slot);
        rows.positions.push_back(static_cast<int32_t>(a.length));
        rows.logit_rows.push_back(static_cast<int32_t>(rows.tokens.size() - 1));
        ++a.length;
      }
      step(rows, part);
    }
  }

  // One decode call and the draws of its rows; sequences that go on join active_.
  void step(const Transformer::DecodeRows& rows, std::vector<Active>& sequences) {
    Pass pass = pass_;
    pass.sample_id = static_cast<uint32_t>(requests_[sequences.front().request].sample_id);
    Transformer::Draws draws{
        static_cast<float>(options_.temperature), static_cast<float>(options_.top_p), options_.key, {}, {}};
    for (const Active& a : sequences) {
      draws.sample_ids.push_back(requests_[a.request].sample_id);
      draws.positions.push_back(static_cast<int32_t>(a.length));
    }
    if (options_.meet) options_.meet(true);
    const Transformer::Drawn drawn = model_.decode_and_draw(pass, rows, draws);
    if (pass_.record_router) record(rows, sequences, drawn.router);
    for (size_t i = 0; i < sequences.size(); ++i) {
      Active a = sequences[i];
      Completion& c = results_[a.request];
      a.next = drawn.tokens[i];
      c.tokens.push_back(a.next);
      c.log_probs.push_back(drawn.log_probs[i]);
      c.finished = std::find(options_.end_tokens.begin(), options_.end_tokens.end(), a.next) !=
                   options_.end_tokens.end();
      const int64_t own_limit = requests_[a.request].max_tokens;
      const int64_t most = own_limit > 0 ? std::min(own_limit, options_.max_tokens) : options_.max_tokens;
      const bool full = static_cast<int64_t>(c.tokens.size()) >= most || a.length >= limit_;
      if (c.finished || full) {
        free_.push_back(a.slot);
        ++done_;
      } else {
        active_.push_back(a);
      }
    }
  }

  // Rows of a call are those of its sequences, one sequence after another.
  void record(const Transformer::DecodeRows& rows, const std::vector<Active>& sequences,
              const std::vector<int32_t>& router) {
    const RoutingShape shape = RoutingShape::of(model_.plan().model);
    size_t at = 0;
    for (size_t row = 0; row < rows.slots.size(); ++row) {
      while (sequences[at].slot != rows.slots[row]) ++at;
      append_routing(shape, router, static_cast<int64_t>(rows.slots.size()), static_cast<int64_t>(row),
                     results_[sequences[at].request].router);
    }
  }

  Transformer& model_;
  const Pass& pass_;
  const std::vector<GenerateRequest>& requests_;
  const GenerateOptions& options_;
  std::vector<Completion> results_;
  std::vector<Active> active_;
  std::vector<int32_t> free_;
  size_t next_request_ = 0;
  int64_t done_ = 0;
  int64_t limit_ = 0;
};

}  // namespace

std::vector<Completion> generate(Transformer& model, const Pass& pass,
                                 const std::vector<GenerateRequest>& requests,
                                 const GenerateOptions& options) {
  FP4T_CHECK(options.max_tokens >= 1, "max_tokens ", options.max_tokens);
  return Batch(model, pass, requests, options).run();
}

}  // namespace fp4t
