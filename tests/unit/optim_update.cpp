// One update of a list of parameters: AdamW and Muon against references in double, clipping, skipping.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>

#include "engine/optim/updater.h"
#include "tests/support/tensors.h"

namespace fp4t {
namespace {

using test::HostTensor;

// Parameters with memory of their own and the plan that they belong to.
class Fixture {
 public:
  explicit Fixture(const std::string& kind = "adamw", DType moments = DType::kF32, bool copies = true) {
    RlSpec stage;
    stage.optimizer.kind = kind;
    plan_.stages.push_back({});
    plan_.stages.back().spec = stage;
    plan_.dtypes.moments = moments;
    plan_.model.heads = 4;
    plan_.model.kv_heads = 2;
    plan_.model.head_dim = 4;
    add("embed.weight", {11, 16}, ParamRole::kEmbedding, Module::kEmbed, DType::kF32, copies);
    add("layers.0.attn.qkv.weight", {32, 16}, ParamRole::kGemmWeight, Module::kAttnQkv, DType::kBf16, copies);
    add("layers.0.mlp_norm.weight", {16}, ParamRole::kNorm, Module::kEmbed, DType::kF32, false);
    add("layers.0.experts.gate_up.weight", {3, 24, 16}, ParamRole::kExpertWeight, Module::kExpertsGateUp,
        DType::kF32, copies);
    add("layers.0.experts.down.weight", {3, 16, 12}, ParamRole::kExpertWeight, Module::kExpertsDown,
        DType::kF32, copies);
    arena_ = std::make_unique<Arena>(queue_, "run", 1 << 20, Poison::kNan);
    updater_ = std::make_unique<Updater>(queue_, plan_, params_, *arena_);
  }

  void fill_gradients(uint64_t seed, float scale = 0.1f) {
    for (size_t i = 0; i < params_.size(); ++i) test::fill_normal(*gradients_[i], seed * 100 + i, scale);
  }

  Updater& updater() { return *updater_; }
  std::vector<Param>& params() { return params_; }

 private:
  void add(const std::string& name, const Shape& shape, ParamRole role, Module module, DType gradient,
           bool copy) {
    ParamInfo info{name,
                   shape,
                   role,
                   module,
                   0,
                   Placement::kReplicated,
                   role != ParamRole::kNorm,
                   false,
                   gradient,
                   static_cast<uint32_t>(params_.size())};
    masters_.push_back(std::make_unique<HostTensor>(DType::kF32, shape));
    test::fill_normal(*masters_.back(), 77 + params_.size(), 0.05f);
    copies_.push_back(std::make_unique<HostTensor>(DType::kBf16, shape));
    gradients_.push_back(std::make_unique<HostTensor>(gradient, shape));
    params_.push_back({info, masters_.back()->view(), copy ? copies_.back()->view() : TensorView{},
                       gradients_.back()->view(), Span{0, shape.elements()}});
    plan_.parameters.push_back(info);
  }

  Queue queue_ = Queue::cpu(2);
  Plan plan_;
  std::vector<std::unique_ptr<HostTensor>> masters_, copies_, gradients_;
  std::vector<Param> params_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Updater> updater_;
};

double value(const TensorView& v, int64_t i) {
  return v.dtype == DType::kF32 ? v.as<float>()[i] : test::from_bf16(v.as<Bf16>()[i]);
}

std::vector<double> values(const TensorView& v) {
  std::vector<double> out;
  for (int64_t i = 0; i < v.elements(); ++i) out.push_back(value(v, i));
  return out;
}

std::vector<char> bytes_of(const TensorView& v) {
  const char* p = static_cast<const char*>(v.data);
  return {p, p + v.bytes()};
}

// Weights, copies and state.
std::vector<std::vector<char>> all_bytes(Fixture& f) {
  std::vector<std::vector<char>> all;
  for (const Param& p : f.params()) {
    all.push_back(bytes_of(p.master));
    if (!p.copy.empty()) all.push_back(bytes_of(p.copy));
  }
  for (const NamedTensor& t : f.updater().state()) all.push_back(bytes_of(t.view));
  return all;
}

double reference_norm(Fixture& f) {
  double sum = 0;
  for (const Param& p : f.params()) {
    for (const double g : values(p.gradient)) sum += g * g;
  }
  return std::sqrt(sum);
}

OptimizerSpec adamw() {
  OptimizerSpec s;
  s.learning_rate = 3e-3;
  s.weight_decay = 0.1;
  s.clip_norm = 1.0;
  return s;
}

struct ReferenceAdamW {
  std::vector<double> w, m, v;
  void step(const std::vector<double>& g, double clip, const OptimizerSpec& s, double factor, bool decay,
            int t) {
    const double lr = s.learning_rate * factor;
    for (size_t i = 0; i < w.size(); ++i) {
      const double gi = g[i] * clip;
      m[i] = s.beta1 * m[i] + (1 - s.beta1) * gi;
      v[i] = s.beta2 * v[i] + (1 - s.beta2) * gi * gi;
      const double mh = m[i] / (1 - std::pow(s.beta1, t)), vh = v[i] / (1 - std::pow(s.beta2, t));
      w[i] -= lr * (mh / (std::sqrt(vh) + s.eps) + (decay ? s.weight_decay : 0.0) * w[i]);
    }
  }
};

TEST(OptimUpdate, adamw_follows_a_reference_in_double_for_ten_steps) {
  Fixture f;
  std::vector<ReferenceAdamW> reference;
  for (const Param& p : f.params()) {
    const size_t n = static_cast<size_t>(p.master.elements());
    reference.push_back({values(p.master), std::vector<double>(n), std::vector<double>(n)});
  }
  const OptimizerSpec spec = adamw();
  for (int t = 1; t <= 10; ++t) {
    f.fill_gradients(static_cast<uint64_t>(t));
    const double norm = reference_norm(f), factor = 1.0 / t;
    const double clip = std::min(1.0, spec.clip_norm / norm);
    for (size_t i = 0; i < reference.size(); ++i) {
      reference[i].step(values(f.params()[i].gradient), clip, spec, factor, f.params()[i].info.weight_decay,
                        t);
    }
    const StepReport r = f.updater().step(spec, factor, static_cast<uint32_t>(t), 0);
    ASSERT_TRUE(r.applied);
    EXPECT_NEAR(r.gradient_norm, norm, 1e-9 * norm);
    EXPECT_NEAR(r.clip_factor, clip, 1e-9);
    EXPECT_LT(r.clip_factor, 1.0) << "the gradients are meant to be clipped";
  }
  for (size_t i = 0; i < reference.size(); ++i) {
    const std::vector<double> w = values(f.params()[i].master);
    for (size_t k = 0; k < w.size(); ++k) {
      ASSERT_NEAR(w[k], reference[i].w[k], 2e-6) << f.params()[i].info.name << " " << k;
    }
  }
  EXPECT_EQ(f.updater().applied(), 10);
}

TEST(OptimUpdate, copies_are_the_new_masters_rounded_to_nearest) {
  Fixture f;
  f.fill_gradients(3);
  ASSERT_TRUE(f.updater().step(adamw(), 1.0, 0, 0).applied);
  for (const Param& p : f.params()) {
    for (int64_t i = 0; !p.copy.empty() && i < p.copy.elements(); ++i) {
      ASSERT_EQ(p.copy.as<Bf16>()[i].bits, test::to_bf16(p.master.as<float>()[i]).bits) << p.info.name;
    }
  }
}

TEST(OptimUpdate, clipping_off_leaves_the_factor_at_one) {
  Fixture f;
  f.fill_gradients(3, 10.0f);
  OptimizerSpec spec = adamw();
  spec.clip_norm = 0;
  EXPECT_EQ(f.updater().step(spec, 1.0, 0, 0).clip_factor, 1.0);
}

TEST(OptimUpdate, one_nan_in_one_gradient_skips_and_changes_no_byte) {
  Fixture f;
  f.fill_gradients(1);
  ASSERT_TRUE(f.updater().step(adamw(), 1.0, 0, 0).applied);
  f.fill_gradients(2);
  f.params()[3].gradient.as<float>()[17] = std::numeric_limits<float>::quiet_NaN();
  const auto before = all_bytes(f);
  const StepReport r = f.updater().step(adamw(), 1.0, 1, 0);
  EXPECT_FALSE(r.applied);
  EXPECT_EQ(r.nonfinite, 1);
  EXPECT_EQ(all_bytes(f), before);
  EXPECT_EQ(f.updater().applied(), 1);
}

TEST(OptimUpdate, what_quantisers_counted_skips_too) {
  Fixture f;
  f.fill_gradients(1);
  const auto before = all_bytes(f);
  const StepReport r = f.updater().step(adamw(), 1.0, 0, 3);
  EXPECT_FALSE(r.applied);
  EXPECT_EQ(r.nonfinite, 3);
  EXPECT_EQ(all_bytes(f), before);
}

TEST(OptimUpdate, bias_correction_counts_applied_updates_only) {
  Fixture skipped, plain;
  skipped.fill_gradients(1);
  EXPECT_FALSE(skipped.updater().step(adamw(), 1.0, 0, 1).applied);
  for (Fixture* f : {&skipped, &plain}) {
    f->fill_gradients(2);
    ASSERT_TRUE(f->updater().step(adamw(), 1.0, 1, 0).applied);
  }
  EXPECT_EQ(all_bytes(skipped), all_bytes(plain));
}

TEST(OptimUpdate, state_restored_by_name_continues_with_the_same_bits) {
  Fixture whole, parts;
  for (Fixture* f : {&whole, &parts}) {
    f->fill_gradients(1);
    ASSERT_TRUE(f->updater().step(adamw(), 1.0, 0, 0).applied);
  }
  std::vector<std::vector<char>> saved;
  for (const NamedTensor& t : parts.updater().state()) saved.push_back(bytes_of(t.view));
  parts.updater().reset();
  EXPECT_EQ(parts.updater().applied(), 0);
  for (const double m : values(parts.updater().state()[0].view)) ASSERT_EQ(m, 0.0);
  const auto state = parts.updater().state();
  for (size_t i = 0; i < saved.size(); ++i)
    std::copy(saved[i].begin(), saved[i].end(), static_cast<char*>(state[i].view.data));
  parts.updater().set_applied(1);
  for (Fixture* f : {&whole, &parts}) {
    f->fill_gradients(2);
    ASSERT_TRUE(f->updater().step(adamw(), 1.0, 1, 0).applied);
  }
  EXPECT_EQ(all_bytes(whole), all_bytes(parts));
  EXPECT_EQ(state[2].name, "optimizer.m.layers.0.attn.qkv.weight");
}

TEST(OptimUpdate, bf16_moments_are_unbiased_stores) {
  Fixture f("adamw", DType::kBf16);
  f.fill_gradients(1);
  OptimizerSpec spec = adamw();
  spec.clip_norm = 0;
  ASSERT_TRUE(f.updater().step(spec, 1.0, 0, 0).applied);
  double error = 0, size = 0;
  for (size_t i = 0; i < f.params().size(); ++i) {
    const TensorView m = f.updater().state()[2 * i].view;
    const bool norm = f.params()[i].info.role == ParamRole::kNorm;
    EXPECT_EQ(m.dtype, norm ? DType::kF32 : DType::kBf16);
    const std::vector<double> g = values(f.params()[i].gradient), stored = values(m);
    for (size_t k = 0; k < g.size(); ++k) {
      const double exact = (1 - static_cast<double>(static_cast<float>(spec.beta1))) * g[k];
      ASSERT_NEAR(stored[k], exact, std::abs(exact) * 0x1p-7 + 1e-12);
      error += (stored[k] - exact) * (exact < 0 ? -1 : 1);
      size += std::abs(exact);
    }
  }
  EXPECT_LT(std::abs(error) / size, 5e-4);  // a truncation would leave 2e-3
}

// X X^T of a matrix, in double.
std::vector<double> gram(const std::vector<double>& x, int64_t rows, int64_t columns) {
  std::vector<double> g(static_cast<size_t>(rows * rows));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < rows; ++j) {
      for (int64_t k = 0; k < columns; ++k) {
        g[static_cast<size_t>(i * rows + j)] +=
            x[static_cast<size_t>(i * columns + k)] * x[static_cast<size_t>(j * columns + k)];
      }
    }
  }
  return g;
}

// The iteration as published, in double, for a wide matrix.
std::vector<double> reference_newton_schulz(std::vector<double> x, int64_t rows, int64_t columns, int n) {
  double norm = 0;
  for (const double v : x) norm += v * v;
  for (double& v : x) v /= std::sqrt(norm) + 1e-7;
  for (int t = 0; t < n; ++t) {
    const std::vector<double> a = gram(x, rows, columns), aa = gram(a, rows, rows);
    std::vector<double> y(x.size());
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < rows; ++k) {
        const auto at = static_cast<size_t>(i * rows + k);
        const double b = -4.7750 * a[at] + 2.0315 * aa[at];
        for (int64_t j = 0; j < columns; ++j) {
          y[static_cast<size_t>(i * columns + j)] += b * x[static_cast<size_t>(k * columns + j)];
        }
      }
    }
    for (size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + y[i];
  }
  return x;
}

std::vector<double> transposed(const std::vector<double>& x, int64_t rows, int64_t columns) {
  std::vector<double> out(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      out[static_cast<size_t>(j * rows + i)] = x[static_cast<size_t>(i * columns + j)];
    }
  }
  return out;
}

TEST(OptimUpdate, muon_moves_every_matrix_by_its_orthogonalised_momentum) {
  Fixture f("muon", DType::kF32);
  f.fill_gradients(5, 0.01f);
  OptimizerSpec spec = adamw();
  spec.kind = "muon";
  spec.weight_decay = 0;
  spec.clip_norm = 0;
  std::vector<std::vector<double>> before;
  for (const Param& p : f.params()) before.push_back(values(p.master));
  ASSERT_TRUE(f.updater().step(spec, 1.0, 0, 0).applied);
  for (size_t i = 0; i < f.params().size(); ++i) {
    const Param& p = f.params()[i];
    if (!is_muon_parameter(p.info)) continue;
    const int64_t columns = p.info.shape[p.info.shape.rank() - 1];
    const std::vector<double> w = values(p.master), g = values(p.gradient);
    int64_t covered = 0;
    Plan shape;
    shape.model.heads = 4;
    shape.model.kv_heads = 2;
    shape.model.head_dim = 4;
    for (const RowSlice& s : muon_matrices(p.info, shape.model)) {
      EXPECT_EQ(s.begin, covered);
      covered += s.count;
      const auto a = s.begin * columns, b = (s.begin + s.count) * columns;
      // First Nesterov step from zero momentum: g + beta g, a multiple of g.
      std::vector<double> x(g.begin() + a, g.begin() + b);
      const bool tall = s.count > columns;
      if (tall) x = transposed(x, s.count, columns);
      const int64_t rows = tall ? columns : s.count, width = tall ? s.count : columns;
      std::vector<double> expected = reference_newton_schulz(x, rows, width, 5);
      const std::vector<double> eye = gram(expected, rows, width);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < rows; ++c) {
          EXPECT_NEAR(eye[static_cast<size_t>(r * rows + c)], r == c ? 0.9 : 0.0, 0.6);
        }
      }
      if (tall) expected = transposed(expected, columns, s.count);
      const double scale =
          std::sqrt(std::max(1.0, static_cast<double>(s.count) / static_cast<double>(columns)));
      for (int64_t k = a; k < b; ++k) {
        const double moved = before[i][static_cast<size_t>(k)] - w[static_cast<size_t>(k)];
        ASSERT_NEAR(moved, spec.muon_learning_rate * scale * expected[static_cast<size_t>(k - a)], 2e-6)
            << p.info.name << " " << k;
      }
    }
    EXPECT_EQ(covered * columns, p.info.shape.elements());
  }
}

TEST(OptimUpdate, muon_orthogonalises_in_fp32) {
  Queue queue = Queue::cpu(2);
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{24, 40}, {40, 24}, {17, 17}, {1, 9}}) {
    SCOPED_TRACE(testing::Message() << "seed 9, " << rows << " x " << columns);
    ParamInfo info;
    info.shape = {rows, columns};
    info.role = ParamRole::kGemmWeight;
    info.module = Module::kAttnOut;
    Arena arena(queue, "run", 1 << 20, Poison::kNan);
    NewtonSchulz ns(queue, arena, {info});
    HostTensor x(DType::kF32, {rows, columns});
    test::fill_normal(x, 9, 3.0f);
    const TensorView view = x.view();
    ns.orthogonalise(view, 5);
    std::vector<double> v = values(view);
    const double scale = std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(columns)));
    for (double& e : v) e /= scale;
    if (rows > columns) v = transposed(v, rows, columns);
    const int64_t side = std::min(rows, columns);
    const std::vector<double> g = gram(v, side, std::max(rows, columns));
    double trace = 0;
    for (int64_t i = 0; i < side; ++i) trace += g[static_cast<size_t>(i * side + i)];
    // The polynomial carries singular values into [0.68, 1.13], where it keeps them; with eigenvalues of the
    // Gram matrix in [0.46, 1.28] no entry beside the diagonal exceeds half of their distance.
    EXPECT_GT(trace / static_cast<double>(side), 0.46);
    EXPECT_LT(trace / static_cast<double>(side), 1.28);
    for (int64_t i = 0; i < side; ++i) {
      for (int64_t j = 0; j < side; ++j) {
        if (i == j) continue;
        EXPECT_LT(std::abs(g[static_cast<size_t>(i * side + j)]), 0.41);
      }
    }
  }
}

// Bytes that a plan prices for the optimizer.
int64_t priced_bytes(const Plan& plan) {
  int64_t bytes = 0;
  for (const MemoryLine& line : plan.memory.run) {
    if (line.name.starts_with("optimizer")) bytes += line.bytes;
  }
  return bytes;
}

TEST(OptimUpdate, the_state_fits_what_the_plan_priced) {
  Queue queue = Queue::cpu(1);
  for (const char* kind : {"adamw", "muon"}) {
    for (const DType moments : {DType::kF32, DType::kBf16}) {
      Recipe recipe;
      recipe.model.layers = 2;
      recipe.model.hidden = 64;
      recipe.model.heads = 2;
      recipe.model.kv_heads = 1;
      recipe.model.head_dim = 48;
      recipe.model.mlp_hidden = 200;
      recipe.model.moe.experts = 4;
      recipe.model.moe.hidden = 40;
      recipe.model.moe.dense_layers = 1;
      recipe.dtypes.moments = moments;
      PretrainSpec stage;
      stage.steps = 1;
      stage.batch = {64, 1, 64};
      stage.optimizer.kind = kind;
      recipe.stages = {stage};
      const Plan plan = make_plan(recipe, Machine{}, {});
      std::vector<Param> params;
      for (const ParamInfo& info : plan.parameters) params.push_back({info, {}, {}, {}, {}});
      Arena arena(queue, "run", priced_bytes(plan), Poison::kNan);
      const Updater updater(queue, plan, params, arena);
      EXPECT_LE(arena.high_water_bytes(), priced_bytes(plan)) << kind;
      EXPECT_EQ(updater.state().size(), 2 * params.size());
    }
  }
}

TEST(OptimUpdate, muon_leaves_a_zero_matrix_at_rest) {
  Fixture f("muon");
  f.fill_gradients(5, 0.0f);
  OptimizerSpec spec = adamw();
  spec.kind = "muon";
  spec.weight_decay = 0;
  const auto before = bytes_of(f.params()[1].master);
  ASSERT_TRUE(f.updater().step(spec, 1.0, 0, 0).applied);
  EXPECT_EQ(bytes_of(f.params()[1].master), before);
}

}  // namespace
}  // namespace fp4t
