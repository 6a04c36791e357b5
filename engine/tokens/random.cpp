// Tokens without sense: every sequence is one document of tokens that are drawn evenly from the whole
// vocabulary but <eod>. For benchmarks, whose work must not depend on a text that is at hand or not.
#include <numeric>

#include "engine/tokens/hash.h"
#include "engine/tokens/source.h"
#include "kernels/base/check.h"
#include "kernels/base/philox.h"

namespace fp4t {

namespace {

class RandomSource : public DataSource {
 public:
  RandomSource(const DataSourceSpec& spec, int64_t length, uint64_t seed, uint32_t index,
               const Tokenizer& tokenizer)
      : name_(spec.name), length_(length), tokens_(static_cast<uint64_t>(tokenizer.vocabulary() - 1)) {
    key_ = site_key(seed, Purpose::kDataGenerate, 2, index, 0, 0);
    fingerprint_ = xxh3_hex(detail::concat("random|", length, "|", tokenizer.fingerprint()));
  }

  Sequence sequence(int64_t n) const override {
    const auto size = static_cast<size_t>(length_);
    Sequence s;
    s.tokens.resize(size);
    for (size_t i = 0; i < size; ++i) {
      const uint64_t draw = static_cast<uint64_t>(n) * size + i;
      s.tokens[i] = static_cast<int32_t>(uint64_t{site_draw(key_, draw).word[0]} * tokens_ >> 32);
    }
    s.targets.assign(s.tokens.begin() + 1, s.tokens.end());
    s.targets.push_back(-1);
    s.positions.resize(size);
    std::iota(s.positions.begin(), s.positions.end(), 0);
    s.doc_begin.assign(size, 0);
    return s;
  }

  std::vector<Sequence> held_out(int64_t) const override { return {}; }
  std::string fingerprint() const override { return fingerprint_; }
  std::string describe() const override {
    return detail::concat(name_, ": random, sequences of ", length_, " of ", tokens_, " tokens");
  }

 private:
  std::string name_, fingerprint_;
  int64_t length_;
  uint64_t tokens_;
  PhiloxKey key_;
};

}  // namespace

std::unique_ptr<DataSource> make_random_source(const DataSourceSpec& spec, int64_t length, uint64_t seed,
                                               uint32_t index, const Tokenizer& tokenizer) {
  return std::make_unique<RandomSource>(spec, length, seed, index, tokenizer);
}

}  // namespace fp4t
