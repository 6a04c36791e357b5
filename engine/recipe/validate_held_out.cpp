// One split for all: a problem held out from one source or task must be held out from all of the same kind.
#include <algorithm>
#include <vector>

#include "engine/recipe/validate.h"
#include "kernels/base/check.h"

namespace fp4t {

namespace {

struct Definition {
  std::string path, kind;
  int64_t low, high, numbers;
  HeldOutSpec held_out;
  std::vector<std::string> paths;  // of jsonl tasks
};

bool share_a_path(const Definition& a, const Definition& b) {
  return std::any_of(a.paths.begin(), a.paths.end(), [&](const std::string& path) {
    return std::ranges::find(b.paths, path) != b.paths.end();
  });
}

std::vector<Definition> definitions(const Recipe& recipe) {
  std::vector<Definition> all;
  const auto add = [&](const std::string& path, const auto& s) {
    if (s.kind != "sums" && s.kind != "countdown") return;
    all.push_back({path, s.kind, s.low, s.high, s.kind == "countdown" ? s.numbers : 0, s.held_out, {}});
  };
  // A data source of kind jsonl has documents, not problems.
  const auto add_task = [&](const std::string& path, const TaskSpec& s) {
    add(path, s);
    if (s.kind == "jsonl") all.push_back({path, s.kind, 0, 0, 0, s.held_out, s.paths});
  };
  for (size_t i = 0; i < recipe.stages.size(); ++i) {
    const std::string path = detail::concat("stages[", i, "].");
    if (const auto* pretrain = std::get_if<PretrainSpec>(&recipe.stages[i])) {
      for (size_t k = 0; k < pretrain->data.size(); ++k) {
        add(detail::concat(path, "pretrain.data[", k, "]"), pretrain->data[k]);
      }
      if (pretrain->eval.task) add_task(path + "pretrain.eval.task", *pretrain->eval.task);
    } else {
      const RlSpec& rl = std::get<RlSpec>(recipe.stages[i]);
      add_task(path + "rl.task", rl.task);
      if (rl.eval.task) add_task(path + "rl.eval.task", *rl.eval.task);
    }
  }
  return all;
}

// "" or what differs.
std::string difference(const Definition& a, const Definition& b) {
  using detail::concat;
  if (a.low != b.low) return concat("low ", a.low, " there, ", b.low, " here");
  if (a.high != b.high) return concat("high ", a.high, " there, ", b.high, " here");
  if (a.held_out.fraction != b.held_out.fraction) {
    return concat("held_out.fraction ", a.held_out.fraction, " there, ", b.held_out.fraction, " here");
  }
  if (a.held_out.seed != b.held_out.seed) {
    return concat("held_out.seed ", a.held_out.seed, " there, ", b.held_out.seed, " here");
  }
  // The hash follows from the rest, so giving it once is enough.
  if (!a.held_out.hash.empty() && !b.held_out.hash.empty() && a.held_out.hash != b.held_out.hash) {
    return concat("held_out.hash ", a.held_out.hash, " there, ", b.held_out.hash, " here");
  }
  return "";
}

}  // namespace

void validate_held_out(Check& c) {
  const std::vector<Definition> all = definitions(c.recipe());
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      const Definition &a = all[k], &b = all[i];
      const bool same_problems =
          a.kind == b.kind &&
          (a.kind == "jsonl" ? share_a_path(a, b)
                             : a.numbers == b.numbers && a.low <= b.high && b.low <= a.high);
      const bool held_out = a.held_out.fraction > 0 || b.held_out.fraction > 0;
      const std::string what = difference(a, b);
      if (!same_problems || !held_out || what.empty()) continue;
      c.fail(b.path,
             "another split of " + b.kind + " than " + a.path + " has (" + what +
                 "): training would see held-out problems",
             {a.path});
      break;
    }
  }
}

}  // namespace fp4t
