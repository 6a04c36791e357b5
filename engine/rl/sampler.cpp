#include "engine/rl/sampler.h"

#include <algorithm>
#include <memory>

#include "engine/plan/cache_layout.h"
#include "engine/rl/routing.h"
#include "kernels/base/numeric.h"

namespace fp4t {

namespace {

// Pages of the cache that nobody holds, and how many hold each of the others.
class PagePool {
 public:
  explicit PagePool(int64_t pages) : holders_(static_cast<size_t>(pages)) {
    for (int64_t p = pages; p > 0; --p) free_.push_back(static_cast<int32_t>(p - 1));
  }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int32_t take() {
    FP4T_CHECK(!free_.empty(), "no free page");
    const int32_t page = free_.back();
    free_.pop_back();
    holders_[static_cast<size_t>(page)] = 1;
    return page;
  }
  void hold(int32_t page) { ++holders_[static_cast<size_t>(page)]; }
  void release(int32_t page) {
    int32_t& holders = holders_[static_cast<size_t>(page)];
    FP4T_CHECK(holders > 0, "page ", page, " is free");
    if (--holders == 0) free_.push_back(page);
  }

 private:
  std::vector<int32_t> free_, holders_;
};

// The prompt of neighbouring requests, computed once but for its last token: the pages that it fills, which
// they share, and the one that it begins, which each of them but the last copies.
struct Prefix {
  size_t request;              // the first
  std::vector<int32_t> pages;  // filled
  int32_t begun = -1;
  std::shared_ptr<std::vector<uint8_t>> router;  // where the pass records routing: of the cached tokens
};

// A sequence in flight.
struct Active {
  size_t request;
  int32_t slot;
  int64_t length;  // tokens whose keys and values are in the cache after the next decode call
  int32_t next;    // the token that the next decode call reads
  std::vector<int32_t> pages;
};

class Batch {
 public:
  Batch(Transformer& model, const Pass& pass, const std::vector<GenerateRequest>& requests,
        const GenerateOptions& options)
      : model_(model),
        pass_(pass),
        requests_(requests),
        options_(options),
        results_(requests.size()),
        pool_(model.num_pages()) {
    limit_ = std::min(model.plan().max_cache_length, model.plan().model.max_positions);
    const int64_t slots = std::min(options.max_batch, model.plan().max_cache_slots);
    FP4T_CHECK(slots >= 1, "no cache slots in the plan");
    for (int64_t s = slots; s > 0; --s) free_.push_back(static_cast<int32_t>(s - 1));
  }

  std::vector<Completion> run() {
    while (next_request_ < requests_.size() || !active_.empty()) {
      while (admit()) {
      }
      decode();
      if (options_.progress) options_.progress(done_, static_cast<int64_t>(requests_.size()));
    }
    Pass nobody = pass_;
    nobody.sample_id = UINT32_MAX;
    while (options_.meet && options_.meet(false)) model_.decode_and_draw(nobody, {}, {});
    return std::move(results_);
  }

 private:
  int64_t max_tokens_of(size_t request) const {
    const int64_t own = requests_[request].max_tokens;
    return own > 0 ? std::min(own, options_.max_tokens) : options_.max_tokens;
  }
  bool same_prompt(size_t a, size_t b) const {
    return a < requests_.size() && b < requests_.size() && requests_[a].prompt == requests_[b].prompt;
  }

  // A prompt's rows in a round's call.
  struct PromptRows {
    size_t begin, end;
    std::shared_ptr<std::vector<uint8_t>> router;
  };
  // What one call of admit() lets in.
  struct Round {
    std::vector<PromptRows> prompts;
    std::vector<std::shared_ptr<std::vector<uint8_t>>> routers;  // of each sequence's prompt
    std::vector<Active> sequences;
    std::vector<int32_t> from, to;
    Transformer::DecodeRows rows;
    size_t first_request = 0;
  };

  // Lets requests in as far as slots, pages and the rows of one call go, and computes their prompts; false
  // when nobody came in.
  bool admit() {
    Round round;
    round.first_request = next_request_;
    while (next_request_ < requests_.size() && !free_.empty() && admit_next(round)) {
    }
    if (round.sequences.empty()) {
      FP4T_CHECK(next_request_ == requests_.size() || !active_.empty(),
                 "the plan's cache holds not even one prompt");
      return false;
    }
    if (!round.rows.tokens.empty()) compute_prompts(round);
    model_.copy_pages(pass_, round.from, round.to);
    for (size_t i = 0; i < round.sequences.size(); ++i) {
      Active& a = round.sequences[i];
      model_.set_pages(a.slot, a.pages);
      results_[a.request].router = *round.routers[i];
      active_.push_back(std::move(a));
    }
    return true;
  }

  // The last tokens of the prompts are decoded with the other sequences: logits are wanted of no row. One has
  // them where the call is to return what the routers chose.
  void compute_prompts(Round& round) {
    Pass pass = pass_;
    pass.sample_id = static_cast<uint32_t>(requests_[round.first_request].sample_id);
    if (options_.meet) options_.meet(true);
    if (!pass_.record_router) {
      model_.decode(pass, round.rows);
      return;
    }
    round.rows.logit_rows = {0};
    const Transformer::Draws draws{1.0f, 1.0f, options_.key, {requests_[round.first_request].sample_id}, {0}};
    const Transformer::Drawn drawn = model_.decode_and_draw(pass, round.rows, draws);
    const RoutingShape shape = RoutingShape::of(model_.plan().model);
    const auto rows = static_cast<int64_t>(round.rows.slots.size());
    for (const PromptRows& prompt : round.prompts) {
      for (size_t row = prompt.begin; row < prompt.end; ++row) {
        append_routing(shape, drawn.router, rows, static_cast<int64_t>(row), *prompt.router);
      }
    }
  }

  bool admit_next(Round& round) {
    const GenerateRequest& r = requests_[next_request_];
    const auto n = static_cast<int64_t>(r.prompt.size());
    FP4T_CHECK(n >= 1, "empty prompt");
    FP4T_CHECK(n <= limit_, "a prompt of ", n, " tokens; the plan has room for ", limit_);
    const int64_t cached = n - 1, filled = cached / kKvPage, begun = cached % kKvPage > 0 ? 1 : 0;
    const int64_t all = ceil_div(std::min(n + max_tokens_of(next_request_), limit_), kKvPage);
    const bool first = !prefix_ || !same_prompt(prefix_->request, next_request_);
    const bool last = !same_prompt(next_request_, next_request_ + 1);
    const int64_t in_call = static_cast<int64_t>(round.rows.tokens.size());
    FP4T_CHECK(cached <= model_.plan().max_decode_tokens, "the plan's decode rows hold not even one prompt");
    if (first && in_call + cached > model_.plan().max_decode_tokens) return false;
    // The last one takes the begun page over.
    const int64_t own = all - filled - (last ? begun : 0);
    if (pool_.free() < own + (first ? filled + begun : 0)) return false;
    Active a{next_request_, free_.back(), cached, r.prompt.back(), {}};
    free_.pop_back();
    if (first) begin_prefix(round, a.slot, filled, begun);
    a.pages = prefix_->pages;
    if (!last) {
      for (const int32_t page : prefix_->pages) pool_.hold(page);
    }
    if (last && begun > 0) a.pages.push_back(prefix_->begun);
    for (int64_t i = 0; i < own; ++i) a.pages.push_back(pool_.take());
    if (!last && begun > 0) {
      round.from.push_back(prefix_->begun);
      round.to.push_back(a.pages[static_cast<size_t>(filled)]);
    }
    round.routers.push_back(prefix_->router);
    if (last) prefix_.reset();  // all that it held is the sequence's now
    round.sequences.push_back(std::move(a));
    ++next_request_;
    return true;
  }

  // Pages for the prompt of the next request, and its rows in the round's call, through the request's slot.
  void begin_prefix(Round& round, int32_t slot, int64_t filled, int64_t begun) {
    prefix_ = std::make_unique<Prefix>();
    prefix_->request = next_request_;
    for (int64_t i = 0; i < filled; ++i) prefix_->pages.push_back(pool_.take());
    if (begun > 0) prefix_->begun = pool_.take();
    std::vector<int32_t> pages = prefix_->pages;
    if (begun > 0) pages.push_back(prefix_->begun);
    model_.set_pages(slot, pages);
    prefix_->router = std::make_shared<std::vector<uint8_t>>();
    const size_t begin = round.rows.tokens.size();
    const std::vector<int32_t>& prompt = requests_[next_request_].prompt;
    for (size_t i = 0; i + 1 < prompt.size(); ++i) {
      round.rows.tokens.push_back(prompt[i]);
      round.rows.slots.push_back(slot);
      round.rows.positions.push_back(static_cast<int32_t>(i));
    }
    round.prompts.push_back({begin, round.rows.tokens.size(), prefix_->router});
  }

  void decode() {
    Transformer::DecodeRows rows;
    std::vector<Active> current = std::move(active_);
    active_.clear();
    const auto most = static_cast<size_t>(model_.plan().max_decode_tokens);
    for (size_t begin = 0; begin < current.size(); begin += most) {
      const size_t end = std::min(current.size(), begin + most);
      rows = {};
      std::vector<Active> part(std::make_move_iterator(current.begin() + static_cast<int64_t>(begin)),
                               std::make_move_iterator(current.begin() + static_cast<int64_t>(end)));
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
      Active& a = sequences[i];
      Completion& c = results_[a.request];
      a.next = drawn.tokens[i];
      c.tokens.push_back(a.next);
      c.log_probs.push_back(drawn.log_probs[i]);
      c.finished = std::find(options_.end_tokens.begin(), options_.end_tokens.end(), a.next) !=
                   options_.end_tokens.end();
      const bool full =
          static_cast<int64_t>(c.tokens.size()) >= max_tokens_of(a.request) || a.length >= limit_;
      const bool stopped = options_.watch && options_.watch(a.request, a.next);
      if (c.finished || full || stopped) {
        free_.push_back(a.slot);
        for (const int32_t page : a.pages) pool_.release(page);
        ++done_;
      } else {
        active_.push_back(std::move(a));
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
  PagePool pool_;
  std::unique_ptr<Prefix> prefix_;  // of the last request that came in, when the next one has it too
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
