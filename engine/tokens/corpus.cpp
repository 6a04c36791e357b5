#include "engine/tokens/corpus.h"

#include <algorithm>
#include <numeric>

#include "engine/tokens/hash.h"
#include "engine/tokens/permutation.h"
#include "engine/tokens/source.h"
#include "engine/tokens/token_store.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

// Sources take turns by a table of kPeriod slots, shared out by largest remainder and put into a fixed
// order of the seed: after any number of periods the shares are exact, and the n-th sample of the run is the
// m-th of its source by arithmetic alone.
class Mixture {
 public:
  static constexpr int64_t kPeriod = 1000;

  Mixture(const std::vector<double>& weights, uint64_t seed) {
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<int64_t> share(weights.size());
    std::vector<std::pair<double, size_t>> rest;
    int64_t given = 0;
    for (size_t s = 0; s < weights.size(); ++s) {
      const double exact = weights[s] / total * kPeriod;
      share[s] = static_cast<int64_t>(exact);
      given += share[s];
      rest.emplace_back(static_cast<double>(share[s]) - exact, s);
    }
    std::sort(rest.begin(), rest.end());
    for (size_t i = 0; given < kPeriod; ++i, ++given) ++share[rest[i % rest.size()].second];
    std::vector<int> plain;
    for (size_t s = 0; s < share.size(); ++s)
      plain.insert(plain.end(), static_cast<size_t>(share[s]), static_cast<int>(s));
    const PhiloxKey key = site_key(seed, Purpose::kDataMixture, 0, 0, 0, 0);
    slots_.resize(kPeriod);
    rank_.resize(kPeriod);
    for (int64_t i = 0; i < kPeriod; ++i)
      slots_[static_cast<size_t>(i)] = plain[static_cast<size_t>(permuted_index(key, kPeriod, i))];
    share_ = share;
    std::vector<int64_t> count(weights.size());
    for (size_t i = 0; i < slots_.size(); ++i) rank_[i] = count[static_cast<size_t>(slots_[i])]++;
  }

  int source(int64_t sample) const { return slots_[static_cast<size_t>(sample % kPeriod)]; }
  int64_t turn(int64_t sample) const {
    return sample / kPeriod * share_[static_cast<size_t>(source(sample))] +
           rank_[static_cast<size_t>(sample % kPeriod)];
  }

 private:
  std::vector<int> slots_;
  std::vector<int64_t> rank_, share_;
};

class MixedCorpus : public Corpus {
 public:
  MixedCorpus(const std::vector<DataSourceSpec>& specs, int64_t length, uint64_t seed,
              const Tokenizer& tokenizer)
      : mixture_(weights(specs), seed) {
    for (size_t i = 0; i < specs.size(); ++i) {
      const bool files = has_documents(specs[i].kind);
      const auto make = files                       ? make_document_source
                        : specs[i].kind == "random" ? make_random_source
                                                    : make_generated_source;
      sources_.push_back(make(specs[i], length, seed, static_cast<uint32_t>(i), tokenizer));
      names_.push_back(specs[i].name.empty() ? specs[i].kind : specs[i].name);
      options_ += detail::concat(names_.back(), "=", specs[i].weight, ";");
    }
  }

  Sequence sample(int64_t id) const override {
    return sources_[static_cast<size_t>(mixture_.source(id))]->sequence(mixture_.turn(id));
  }
  int source_of(int64_t id) const override { return mixture_.source(id); }
  std::vector<std::string> source_names() const override { return names_; }
  std::vector<Sequence> held_out(int source, int64_t max_tokens) const override {
    return sources_[static_cast<size_t>(source)]->held_out(max_tokens);
  }
  std::string fingerprint() const override {
    std::string all = options_;
    for (const auto& s : sources_) all += s->fingerprint() + "\n";
    return xxh3_hex(all);
  }
  std::string describe() const override {
    std::string text = "data";
    for (const auto& s : sources_) text += "\n  " + s->describe();
    return text;
  }

 private:
  static std::vector<double> weights(const std::vector<DataSourceSpec>& specs) {
    std::vector<double> list;
    for (const DataSourceSpec& s : specs) list.push_back(s.weight);
    return list;
  }

  Mixture mixture_;
  std::vector<std::unique_ptr<DataSource>> sources_;
  std::vector<std::string> names_;
  std::string options_;
};

}  // namespace

std::unique_ptr<Corpus> make_corpus(const std::vector<DataSourceSpec>& sources, int64_t length, uint64_t seed,
                                    const Tokenizer& tokenizer) {
  FP4T_CHECK(!sources.empty(), "a corpus without sources");
  return std::make_unique<MixedCorpus>(sources, length, seed, tokenizer);
}

}  // namespace fp4t
