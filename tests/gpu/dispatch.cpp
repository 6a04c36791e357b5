// Lists of tokens that travel to other ranks' experts, on the GPU against the CPU.
#include "tests/support/dispatch.h"

#include "kernels/base/check.h"
#include "tests/support/mirror.h"

namespace fp4t::test {
namespace {

constexpr int64_t kTokens[] = {0, 1, 31, 32, 33, 257, 5000, 40000};

struct Choice {
  int64_t experts, ranks, top_k;
};
// One expert a rank and many, k below and above the ranks; 33 of a token's choices are more than a warp.
constexpr Choice kChoices[] = {{1, 1, 1},    {7, 1, 3},   {8, 8, 2},    {16, 2, 10},  {24, 3, 5},
                               {64, 2, 8},   {64, 8, 4},  {72, 72, 8},  {144, 72, 6}, {504, 72, 9},
                               {504, 3, 33}, {512, 8, 7}, {512, 2, 10}, {512, 8, 33}, {96, 3, 10}};

// 1, 2, 5 and L of them, as far as there are experts.
std::vector<int64_t> chunks_of(const Choice& c) {
  const int64_t local = c.experts / c.ranks;
  std::vector<int64_t> list = {1};
  for (const int64_t chunks : {int64_t{2}, int64_t{5}, local}) {
    if (chunks <= local && chunks > list.back()) list.push_back(chunks);
  }
  return list;
}

std::string text(const ExpertSplit& s, int64_t tokens, int64_t top_k, bool lopsided) {
  return detail::concat("T=", tokens, " E=", s.experts, " X=", s.ranks, " n=", s.chunks, " k=", top_k,
                        lopsided ? " lopsided" : "");
}

// body(split, tokens, top_k, lopsided, engine) for all sizes up to `most` tokens.
template <class Body>
void for_sizes(int64_t most, const Body& body) {
  std::mt19937_64 engine(31);
  for (const int64_t tokens : kTokens) {
    if (tokens > most) continue;
    for (const Choice& c : kChoices) {
      for (const int64_t chunks : chunks_of(c)) {
        for (const bool lopsided : {false, true}) {
          if (lopsided && tokens < 31) continue;
          const ExpertSplit split{c.experts, c.ranks, chunks};
          SCOPED_TRACE(text(split, tokens, c.top_k, lopsided));
          body(split, tokens, c.top_k, lopsided, engine);
        }
      }
    }
  }
}

// Visits that were listed: those counted for every rank.
int64_t num_listed(const DispatchTensors& t) {
  const int32_t* counts = t.counts.as<int32_t>() + t.split.experts;
  return std::accumulate(counts, counts + t.split.chunks * t.split.ranks, int64_t{0});
}

TEST(GpuDispatch, visits_are_bitwise) {
  for_sizes(40000, [](const ExpertSplit& split, int64_t tokens, int64_t k, bool lopsided, auto& engine) {
    Mirror m;
    const DispatchTensors t(m, split, tokens, k);
    t.choose(random_choices(engine, tokens, k, split.experts, lopsided));
    m.check(t.all(0));
    if (tokens == 257) m.check(t.all(t.asked.elements() - num_listed(t)));  // behind others
  });
}

// Rounds one after another: each begins where those before it end, and leaves what they wrote.
void check_rounds(const ExpertSplit& split, int64_t tokens, int64_t k, bool lopsided,
                  std::mt19937_64& engine) {
  Mirror m;
  const DispatchTensors t(m, split, tokens, k);
  t.choose(random_choices(engine, tokens, k, split.experts, lopsided));
  int64_t end = 0;
  for (int64_t r = 0; r < split.ranks; ++r) {
    const auto first = static_cast<int64_t>(engine() % static_cast<uint64_t>(tokens + 1));
    t.first_row.as<int64_t>()[r] = first;
    end = std::max(end, first + rows_on(r, split, list_of(t.experts)));
  }
  const int64_t round_rows = end / 3 + 1;
  int64_t listed = 0;
  for (int64_t begin = 0; begin < end; begin += round_rows) {
    m.check(t.window(begin, begin + round_rows, listed));
    listed += num_listed(t);
  }
  const std::vector<int32_t> ranks = list_of(t.rank_of);
  EXPECT_EQ(listed, std::count_if(ranks.begin(), ranks.end(), [](int32_t r) { return r >= 0; }));
}

TEST(GpuDispatch, rounds_are_bitwise) { for_sizes(5000, check_rounds); }

TEST(GpuDispatch, rounds_of_many_tokens_are_bitwise) {
  std::mt19937_64 engine(32);
  for (const bool lopsided : {false, true}) {
    check_rounds({64, 2, 1}, 40000, 8, lopsided, engine);
    check_rounds({512, 8, 5}, 40000, 10, lopsided, engine);
  }
}

// Rows of receivers are counted over all ranks: beyond 32 bits.
TEST(GpuDispatch, rows_of_a_window_may_be_large) {
  constexpr int64_t kFar = (int64_t{1} << 33) + 5;
  std::mt19937_64 engine(33);
  Mirror m;
  const DispatchTensors t(m, {24, 3, 2}, 300, 4);
  t.choose(random_choices(engine, 300, 4, 24, false));
  std::fill_n(t.first_row.as<int64_t>(), 3, kFar);
  m.check(t.window(kFar + 100, kFar + 200, 7));
  EXPECT_GT(num_listed(t), 0);
  m.check(t.window(100, 200, 7));
  EXPECT_EQ(num_listed(t), 0);
}

TEST(GpuDispatch, guests_are_bitwise) {
  for_sizes(40000, [](const ExpertSplit& split, int64_t guests, int64_t k, bool lopsided, auto& engine) {
    Mirror m;
    const auto rank = static_cast<int64_t>(engine() % static_cast<uint64_t>(split.ranks));
    std::vector<int32_t> choices = random_choices(engine, guests, k, split.experts, lopsided);
    bring_to(rank, split, k, engine, choices);
    const GuestTensors t(m, split, rank, guests, k, rows_on(rank, split, choices));
    t.come(choices, random_origins(engine, guests, split.ranks));
    const PlaceGuests op = t.place();
    m.check(op);
  });
}

TEST(GpuDispatch, a_visit_to_an_expert_out_of_range_is_a_fault) {
  for (const int64_t chunks : {1, 3}) {
    for (const int32_t expert : {-1, 6}) {
      for (const bool window : {false, true}) {
        SCOPED_TRACE(detail::concat("n=", chunks, " expert ", expert, window ? " in a window" : ""));
        Mirror m;
        const DispatchTensors t(m, {6, 2, chunks}, 2, 2);
        t.choose({0, 1, 2, 5});
        std::fill_n(t.first_row.as<int64_t>(), 2, int64_t{0});
        const DispatchTokens op = window ? t.window(0, 9, 0) : t.all(0);
        m.run_on_gpu(op);
        t.choose({0, 1, 2, expert});
        EXPECT_THROW(m.run_on_gpu(op), InternalError);
      }
    }
  }
}

// Two guests with three rows on rank 1 of 2, or something else.
void place_two(int64_t chunks, const std::vector<int32_t>& choices, int64_t rows) {
  Mirror m;
  const GuestTensors t(m, {6, 2, chunks}, 1, 2, 2, rows);
  t.come(choices, {1, 1});
  m.run_on_gpu(t.place());
}

TEST(GpuDispatch, guests_that_do_not_fit_are_faults) {
  for (const int64_t chunks : {1, 3}) {
    SCOPED_TRACE(chunks);
    place_two(chunks, {3, 4, 5, 0}, 3);
    EXPECT_THROW(place_two(chunks, {3, 4, 2, 0}, 2), InternalError) << "none of its experts is here";
    EXPECT_THROW(place_two(chunks, {3, 4, 5, 6}, 3), InternalError) << "an expert out of range";
    EXPECT_THROW(place_two(chunks, {3, 4, 5, -1}, 3), InternalError) << "an expert out of range";
    EXPECT_THROW(place_two(chunks, {3, 4, 5, 0}, 2), InternalError) << "more rows than room";
    EXPECT_THROW(place_two(chunks, {3, 4, 5, 0}, 4), InternalError) << "fewer rows than room";
  }
}

}  // namespace
}  // namespace fp4t::test

FP4T_GPU_TEST_MAIN
