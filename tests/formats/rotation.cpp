// Hadamard rotations and MS-EDEN: the transform, its signs, and the statistics of what comes out.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/formats/hadamard.h"
#include "kernels/formats/ms_eden.h"
#include "tests/formats/operand.h"

namespace fp4t::test {
namespace {

template <int D>
void check_matrix(const HadamardSigns& signs) {
  // Column j of the transform is what it does to the unit vector j: sign_j (-1)^popcount(i & j) / sqrt(d).
  for (int j = 0; j < D; ++j) {
    float v[D][1] = {};
    v[j][0] = 1;
    hadamard_rotate<D, 1>(v, signs);
    const bool minus = signs.word[j / 32] >> (j % 32) & 1;
    for (int i = 0; i < D; ++i) {
      const bool flip = (__builtin_popcount(static_cast<unsigned>(i & j)) % 2 == 1) != minus;
      const float expected = static_cast<float>(1 / std::sqrt(double{D}));
      ASSERT_EQ(v[i][0], flip ? -expected : expected) << D << " row " << i << " column " << j;
    }
  }
}

TEST(Hadamard, is_the_signed_sylvester_matrix_over_sqrt_d) {
  for (Signs signs : {Signs::kFixed, Signs::kFresh}) {
    const HadamardSigns s = hadamard_signs(signs, kSignsKey);
    check_matrix<16>(s);
    check_matrix<32>(s);
    check_matrix<64>(s);
    check_matrix<128>(s);
  }
}

TEST(Hadamard, fixed_signs_repeat_the_recipe_vector) {
  const std::string expected = "+++-+------+-+--";
  const HadamardSigns s = hadamard_signs(Signs::kFixed, kSignsKey);
  for (size_t i = 0; i < 128; ++i) {
    EXPECT_EQ((s.word[i / 32] >> (i % 32) & 1) != 0, expected[i % 16] == '-') << i;
  }
}

TEST(Hadamard, fresh_signs_are_the_sites_first_draw_and_change_with_the_key) {
  const HadamardSigns a = hadamard_signs(Signs::kFresh, kSignsKey);
  const PhiloxBits draw = site_draw(kSignsKey, 0);
  for (int w = 0; w < 4; ++w) EXPECT_EQ(a.word[w], draw.word[w]);
  const PhiloxKey next = site_key(7, Purpose::kSigns, 0, 3, 12, 0);
  EXPECT_NE(hadamard_signs(Signs::kFresh, next).word[0], a.word[0]);
}

std::vector<float> full_values(Queue& queue, const QuantView& v) {
  HostTensor out(DType::kF32, {v.rows, v.cols});
  run(queue, Dequantize{v, {}, DecodeScale::kFull, out.view(), {}});
  return {out.as<float>(), out.as<float>() + out.elements()};
}

TEST(Hadamard, both_operands_of_a_product_share_their_fresh_signs_so_the_product_survives) {
  // In wgrad one operand is dY^T, the other X^T; both are read in the column orientation, with draw keys of
  // their own and one signs key. Unequal signs would leave nothing of the product.
  Queue queue = Queue::cpu(1);
  constexpr int64_t kTokens = 256, kOut = 16, kIn = 24;
  HostTensor x(DType::kBf16, {kTokens, kIn}), dy(DType::kBf16, {kTokens, kOut});
  fill_normal(x, 1);
  fill_normal(dy, 2);
  for (int64_t t = 0; t < kTokens; ++t) dy.as<Bf16>()[t * kOut] = x.as<Bf16>()[t * kIn];  // correlated
  for (Rounding rounding : {Rounding::kNearest, Rounding::kMsEden}) {
    const QuantSpec spec{
        .format = Format::kNvfp4, .rounding = rounding, .hadamard = 128, .signs = Signs::kFresh};
    Operand a(spec, GroupAxis::kCols, 1, kOut, kTokens), b(spec, GroupAxis::kCols, 1, kIn, kTokens);
    Quantize op = quantize_op(dy, Orientation::kColumn, a);
    op.draw_key = {1, 2};
    run(queue, op);
    op = quantize_op(x, Orientation::kColumn, b);
    op.draw_key = {3, 4};
    run(queue, op);
    const std::vector<float> qa = full_values(queue, a.view), qb = full_values(queue, b.view);
    double error = 0, signal = 0;
    for (int64_t o = 0; o < kOut; ++o) {
      for (int64_t i = 0; i < kIn; ++i) {
        double exact = 0, got = 0;
        for (int64_t t = 0; t < kTokens; ++t) {
          exact +=
              double{from_bf16(dy.as<Bf16>()[t * kOut + o])} * double{from_bf16(x.as<Bf16>()[t * kIn + i])};
          got += double{qa[static_cast<size_t>(o * kTokens + t)]} *
                 double{qb[static_cast<size_t>(i * kTokens + t)]};
        }
        error += (got - exact) * (got - exact);
        signal += exact * exact;
      }
    }
    // Two operands of relative error energy 0.009: noise 0.018 of the mean square product.
    EXPECT_LT(error / signal, 0.03) << name_of(rounding);
  }
}

TEST(MsEden, final_scale_is_a_neighbour_and_its_mean_is_z) {
  // Every 2^16th word stands for 2^16 of them: the mean over words is exact to 2^-16 of a step.
  for (float s : {0x1p-9f, 0.0137f, 1.0f, 1.7f, 13.9f, 200.0f, 416.0f, 430.0f, 447.9f, 448.0f, 600.0f}) {
    for (float correction : {0.97f, 1.0f, 1.0113f}) {
      const double z = std::fmin(correction * s, 448.0f);
      double sum = 0, low = 1e9, high = 0;
      for (uint32_t w = 0; w < 65536; ++w) {
        const double value = double{e4m3_value(ms_eden_final_scale(correction, s, w << 16))};
        sum += value;
        low = std::min(low, value);
        high = std::max(high, value);
      }
      EXPECT_LE(low, z);
      EXPECT_GE(high, std::floor(z * 0x1p20) / 0x1p20 - (high - low) / 65536);
      EXPECT_NEAR(sum / 65536, z, (high - low) / 65536 + 1e-9) << s << " x " << correction;
      if (high > low) {
        EXPECT_EQ(e4m3_nearest(static_cast<float>(high)), e4m3_nearest(static_cast<float>(low)) + 1);
      }
    }
  }
}

TEST(MsEden, correction_falls_back_to_one_without_a_usable_ratio) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  EXPECT_EQ(ms_eden_correction(2, 1), 2.0f);
  for (auto [num, den] :
       {std::pair{0.0f, 0.0f}, {1.0f, -1.0f}, {inf, inf}, {inf, 1.0f}, {1.0f, inf}, {nan, nan}}) {
    EXPECT_EQ(ms_eden_correction(num, den), 1.0f) << num << " / " << den;
  }
}

// <mean of Q(x) - x, x> / |x|^2 over `draws` runs with new signs and draws each, in the rotated space.
double shrink(const QuantSpec& spec, const Matrix& m, int draws) {
  Queue queue = Queue::cpu(2);
  HostTensor x = bf16_tensor(m);
  double dot = 0, energy = 0;
  for (int i = 0; i < draws; ++i) {
    Operand q(spec, GroupAxis::kRows, 1, m.rows, m.cols);
    Quantize op = quantize_op(x, Orientation::kRow, q);
    op.draw_key = site_key(5, Purpose::kRounding, 0, 1, static_cast<uint32_t>(i), 0);
    op.signs_key = site_key(5, Purpose::kSigns, 0, 1, static_cast<uint32_t>(i), 0);
    run(queue, op);
    const std::vector<float> y = full_values(queue, q.view);
    const Matrix rotated = padded_and_rotated(m, spec, {op.draw_key, op.signs_key, 0, false});
    for (size_t j = 0; j < y.size(); ++j) {
      dot += (double{y[j]} - double{rotated.v[j]}) * double{rotated.v[j]};
      energy += double{rotated.v[j]} * double{rotated.v[j]};
    }
  }
  return dot / energy;
}

TEST(Unbiased, stochastic_with_headroom_and_ms_eden_do_not_shrink_and_nearest_does) {
  HostTensor t(DType::kBf16, {128, 1024});
  fill_normal(t, 17);
  Matrix m{128, 1024, {}};
  for (int64_t i = 0; i < t.elements(); ++i) m.v.push_back(from_bf16(t.as<Bf16>()[i]));
  const QuantSpec nearest{.format = Format::kNvfp4};
  QuantSpec plain = nearest, headroom = nearest, eden = nearest;
  plain.rounding = headroom.rounding = Rounding::kStochastic;
  headroom.headroom = Headroom::k17over16;
  eden.rounding = Rounding::kMsEden;
  eden.hadamard = 128;
  eden.signs = Signs::kFresh;
  // NUMERICS.md section 2.2 and the table of kernels/formats/README.md. The eight-bit draw takes 0.0007 from
  // both stochastic ones; nearest and plain stochastic depend on where the tensor's maximum falls.
  EXPECT_LT(shrink(nearest, m, 1), -0.003);
  EXPECT_LT(shrink(plain, m, 8), -0.003);
  EXPECT_NEAR(shrink(headroom, m, 8), -0.0007, 0.0003);
  EXPECT_NEAR(shrink(eden, m, 8), 0, 0.0002);
}

}  // namespace
}  // namespace fp4t::test
