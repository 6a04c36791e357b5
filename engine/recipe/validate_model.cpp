// Checks of run, model, parallel and dtypes.
#include "engine/recipe/validate.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

using detail::concat;

void heads_share_kv_heads(Check& c) {
  const ModelSpec& m = c.recipe().model;
  if (m.kv_heads > 0 && m.heads % m.kv_heads != 0) {
    c.fail("model.kv_heads", concat("found ", m.kv_heads, "; allowed: a divisor of heads (", m.heads, ")"),
           {"model.heads"});
  }
}

void head_dim_is_even(Check& c) {
  const int64_t head_dim = c.recipe().model.head_dim;
  if (head_dim % 2 != 0) {
    c.fail("model.head_dim", concat("found ", head_dim, "; allowed: an even number, RoPE turns pairs"));
  }
}

void vocabulary_holds_the_tokens(Check& c) {
  const int64_t vocabulary = c.recipe().model.vocabulary;
  constexpr int64_t kBytesTokens = 257;  // 256 byte values and <eod>
  const TokenizerSpec& tokenizer = c.recipe().tokenizer;
  // A file's tokens are counted when it is read; the plan compares then.
  const int64_t tokens = tokenizer.kind == "bytes" ? kBytesTokens : tokenizer.vocabulary;
  if (vocabulary != 0 && vocabulary < tokens) {
    c.fail("model.vocabulary",
           concat("found ", vocabulary, "; allowed: 0, or at least the ", tokens, " of tokenizer.kind ",
                  tokenizer.kind),
           {"tokenizer"});
  }
}

void top_k_is_among_experts(Check& c) {
  const MoeSpec& moe = c.recipe().model.moe;
  if (moe.experts > 0 && moe.top_k > moe.experts) {
    c.fail("model.moe.top_k", concat("found ", moe.top_k, "; allowed: 1 to experts (", moe.experts, ")"),
           {"model.moe.experts"});
  }
}

void some_layer_has_experts(Check& c) {
  const ModelSpec& m = c.recipe().model;
  if (m.moe.experts > 0 && m.moe.dense_layers >= m.layers) {
    c.fail("model.moe.dense_layers",
           concat("found ", m.moe.dense_layers, ", which leaves no layer with experts; allowed: 0 to ",
                  m.layers - 1, " (model.layers is ", m.layers, "); a dense model has experts: 0"),
           {"model.layers", "model.moe.experts"});
  }
}

void llama3_wavelengths_are_ordered(Check& c) {
  const RopeSpec& rope = c.recipe().model.rope;
  if (rope.scaling == "llama3" && rope.low_freq_factor >= rope.high_freq_factor) {
    c.fail("model.rope.low_freq_factor",
           concat("found ", rope.low_freq_factor, "; allowed: less than high_freq_factor (",
                  rope.high_freq_factor, ")"),
           {"model.rope.high_freq_factor", "model.rope.scaling"});
  }
}

void yarn_rotations_are_ordered(Check& c) {
  const RopeSpec& rope = c.recipe().model.rope;
  if (rope.scaling == "yarn" && rope.beta_slow >= rope.beta_fast) {
    c.fail("model.rope.beta_slow",
           concat("found ", rope.beta_slow, "; allowed: less than beta_fast (", rope.beta_fast, ")"),
           {"model.rope.beta_fast", "model.rope.scaling"});
  }
}

void experts_spread_evenly(Check& c) {
  const int64_t expert = c.recipe().parallel.expert;
  const int64_t experts = c.recipe().model.moe.experts;
  if (expert > 1 && (experts == 0 || experts % expert != 0)) {
    c.fail("parallel.expert",
           concat("found ", expert, "; allowed: a divisor of model.moe.experts (", experts, ")"),
           {"model.moe.experts"});
  }
}

// A rank's room for rows is the number of rounds upside down: with less than this a step does not end.
void rounds_are_few(Check& c) {
  constexpr double kLeast = 0.05;
  const double factor = c.recipe().parallel.receive_factor;
  if (factor > 0 && factor < kLeast) {
    c.fail("parallel.receive_factor",
           concat("found ", factor, "; allowed: from ", kLeast, " on, or 0 for all that could come"));
  }
}

// Keys whose other value nothing in this program could honour.
void promises_are_kept(Check& c) {
  const RunSpec& run = c.recipe().run;
  if (!run.deterministic) {
    c.fail("run.deterministic",
           "found false; allowed: true, every sum has one order and there is no faster one to turn to");
  }
  if (run.allow_fault_injection) {
    c.fail("run.allow_fault_injection",
           "found true; allowed: false, this program has no fault injection to allow");
  }
}

// Parameters, and with them bytes and FLOPs, must be countable in 64 bits.
void parameters_are_countable(Check& c) {
  const ModelSpec& m = c.recipe().model;
  constexpr double kMostParameters = 0x1p48;
  const auto d = [](int64_t v) { return static_cast<double>(v); };
  const double attention = 2 * (d(m.heads) + d(m.kv_heads)) * d(m.head_dim) * d(m.hidden);
  const double dense = 3 * d(m.mlp_hidden) * d(m.hidden);
  const double routed = 3 * d(m.moe.experts) * d(m.moe.hidden) * d(m.hidden);
  const double shared = 3 * d(m.moe.shared_experts) * d(m.moe.shared_hidden) * d(m.hidden);
  const double total = d(m.layers) * (attention + dense + routed + shared + d(m.moe.experts) * d(m.hidden)) +
                       2 * d(m.vocabulary) * d(m.hidden);
  if (total > kMostParameters) {
    c.fail("model",
           concat("found sizes that make ", total, " parameters; allowed: at most ", kMostParameters),
           {"model.layers", "model.hidden", "model.moe"});
  }
}

void run_begins_from_one_place(Check& c) {
  const RunSpec& run = c.recipe().run;
  if (!run.branch_from.empty() && run.resume != "auto" && run.resume != "never") {
    c.fail("run.branch_from", "contradicts run.resume (" + run.resume +
                                  "): a run starts from one checkpoint or continues another, not both");
  }
}

void names_are_not_empty(Check& c) {
  const RunSpec& run = c.recipe().run;
  if (run.name.empty()) c.fail("run.name", "found an empty text; allowed: a name");
  if (run.dir.empty()) c.fail("run.dir", "found an empty text; allowed: a folder");
  if (run.resume.empty())
    c.fail("run.resume", "found an empty text; allowed: auto, never or a checkpoint folder");
}

}  // namespace

void validate_model(Check& c) {
  names_are_not_empty(c);
  run_begins_from_one_place(c);
  heads_share_kv_heads(c);
  head_dim_is_even(c);
  vocabulary_holds_the_tokens(c);
  top_k_is_among_experts(c);
  some_layer_has_experts(c);
  llama3_wavelengths_are_ordered(c);
  yarn_rotations_are_ordered(c);
  experts_spread_evenly(c);
  rounds_are_few(c);
  promises_are_kept(c);
  parameters_are_countable(c);
}

}  // namespace fp4t
