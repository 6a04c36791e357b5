// The sampler: a completion depends on weights, key, prompt and sample number alone, whatever shares the
// cache with it and however few pages there are; what neighbours share is computed once.
#include "engine/rl/sampler.h"

#include <map>

#include "gtest/gtest.h"
#include "tests/support/model_runs.h"

namespace fp4t::test {
namespace {

std::map<std::string, TestCells> cells() {
  std::map<std::string, TestCells> c;
  c["bf16"] = {};
  c["rl_nvfp4_kv_mxfp8"] = rl_nvfp4_cells();
  c["rl_nvfp4_kv_mxfp8"].kv_cache = Format::kMxfp8;
  return c;
}

// Prompts of 1, 20, 33, 40, 32 and 20 tokens: none, a begun, a filled and a begun page, ...; `samples` of
// each.
std::vector<GenerateRequest> requests_of(int64_t samples) {
  std::vector<GenerateRequest> list;
  int64_t id = 100;
  for (const int length : {1, 20, 33, 40, 32, 20}) {
    const TokenBatch prompt = random_batch({length}, tiny_model().vocabulary, static_cast<uint64_t>(length));
    for (int64_t s = 0; s < samples; ++s) list.push_back({prompt.tokens, id++, 0});
  }
  return list;
}

GenerateOptions options_of(int64_t max_batch) {
  GenerateOptions o;
  o.max_tokens = 30;
  o.max_batch = max_batch;
  o.end_tokens = {3, 17, 40};
  o.key = {5, 6};
  return o;
}

bool operator==(const Completion& a, const Completion& b) {
  const auto bytes = [](const Completion& c) {
    return std::string(reinterpret_cast<const char*>(c.log_probs.data()), c.log_probs.size() * sizeof(float));
  };
  return a.tokens == b.tokens && a.finished == b.finished && bytes(a) == bytes(b);
}

class Sampler : public testing::TestWithParam<std::string> {
 protected:
  // In a plan with so many slots and pages; 0: pages for all of them.
  std::vector<Completion> run(const std::vector<GenerateRequest>& requests, int64_t slots, int64_t pages,
                              const GenerateOptions& options) {
    TestSizes sizes;
    sizes.max_cache_slots = slots;
    Plan plan = make_plan_by_hand(tiny_model(), cells().at(GetParam()), {}, "none", sizes);
    plan.max_cache_pages = pages;
    plan.memory = plan_memory(plan);
    TestModel m(plan);
    return generate(m.model, m.sampling_pass(), requests, options);
  }
};

TEST_P(Sampler, a_completion_does_not_depend_on_what_runs_beside_it) {
  const std::vector<GenerateRequest> requests = requests_of(3);
  std::vector<Completion> alone;
  for (const GenerateRequest& r : requests) alone.push_back(run({r}, 1, 0, options_of(1))[0]);
  const auto expect_same = [&](const std::vector<Completion>& all, const char* what) {
    ASSERT_EQ(all.size(), alone.size());
    for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(all[i] == alone[i]) << what << ", request " << i;
  };
  expect_same(run(requests, 96, 0, options_of(96)), "all at once");
  expect_same(run(requests, 5, 0, options_of(5)), "five slots");
  expect_same(run(requests, 96, 0, options_of(2)), "two at a time");
  expect_same(run(requests, 96, 5, options_of(96)), "five pages");
  expect_same(run(requests, 96, 3, options_of(96)), "three pages, the least");
  // In another order, so that no two neighbours have one prompt.
  std::vector<GenerateRequest> mixed;
  std::vector<size_t> places;
  for (size_t s = 3; s-- > 0;) {
    for (size_t p = 0; p < 6; ++p) {
      mixed.push_back(requests[p * 3 + s]);
      places.push_back(p * 3 + s);
    }
  }
  const std::vector<Completion> other = run(mixed, 7, 0, options_of(7));
  for (size_t i = 0; i < other.size(); ++i)
    EXPECT_TRUE(other[i] == alone[places[i]]) << "mixed, request " << i;
  bool any_end = false, any_cut = false;
  for (const Completion& c : alone) {
    any_end |= c.finished && c.tokens.size() > 1;
    any_cut |= !c.finished;
  }
  EXPECT_TRUE(any_end && any_cut);  // else the test shows little
}

TEST_P(Sampler, every_request_may_have_a_limit_of_its_own) {
  std::vector<GenerateRequest> requests = requests_of(2);
  const std::vector<Completion> free = run(requests, 96, 0, options_of(96));
  for (size_t i = 0; i < requests.size(); ++i) requests[i].max_tokens = static_cast<int64_t>(i) + 1;
  requests[5].max_tokens = 1000;  // within the options'
  const std::vector<Completion> limited = run(requests, 96, 0, options_of(96));
  for (size_t i = 0; i < requests.size(); ++i) {
    const size_t most = i == 5 ? 30 : i + 1, n = std::min(free[i].tokens.size(), most);
    EXPECT_EQ(limited[i].tokens,
              std::vector<int32_t>(free[i].tokens.begin(), free[i].tokens.begin() + static_cast<int64_t>(n)));
    EXPECT_EQ(limited[i].finished, free[i].finished && free[i].tokens.size() <= most) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Model, Sampler, testing::Values("bf16", "rl_nvfp4_kv_mxfp8"),
                         [](const auto& test) { return test.param; });

// Tokens that went through the router, which counts them.
TEST(SamplerWork, a_prompt_is_computed_once_for_all_its_samples) {
  TestModel m(make_plan_by_hand(tiny_model(), {}));
  Pass pass = m.sampling_pass();
  pass.count_load = true;
  GenerateOptions options = options_of(96);
  options.max_tokens = 1;
  const TokenBatch prompt = random_batch({40}, tiny_model().vocabulary, 1);
  std::vector<GenerateRequest> requests;
  for (int64_t s = 0; s < 8; ++s) requests.push_back({prompt.tokens, s, 0});
  m.model.take_router_sums();
  generate(m.model, pass, requests, options);
  int64_t counted = 0;
  const RouterSums sums = m.model.take_router_sums();
  for (const int64_t n : sums.load.at(0)) counted += n;
  // 39 tokens once, the last of the prompt for each sample.
  EXPECT_EQ(counted, (39 + 8) * tiny_model().moe.top_k);
}

}  // namespace
}  // namespace fp4t::test
