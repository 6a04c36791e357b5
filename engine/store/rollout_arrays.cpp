#include "engine/store/rollout_arrays.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/store/manifest.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

// One visitor walks the fields; it either writes or reads each, so both directions agree.
class ArrayWriter {
 public:
  template <class T>
  void flat(const char* name, const std::vector<T>& values) {
    HostArray a;
    a.name = std::string(kRolloutPrefix) + name;
    a.dtype = DTypeOf<T>::value;
    a.dims = {static_cast<int64_t>(values.size())};
    a.bytes.resize(values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(a.bytes.data(), values.data(), a.bytes.size());
    arrays.push_back(std::move(a));
  }
  // Lists that not every rollout has are stored where there is one.
  bool wants(const char*, bool there) const { return there; }
  std::vector<HostArray> arrays;
};

class ArrayReader {
 public:
  ArrayReader(const std::function<HostArray(const std::string&)>& find,
              const std::function<bool(const std::string&)>& has)
      : find_(find), has_(has) {}

  bool wants(const char* name, bool) const { return has_(std::string(kRolloutPrefix) + name); }

  template <class T>
  void flat(const char* name, std::vector<T>& values) {
    const HostArray a = find_(std::string(kRolloutPrefix) + name);
    if (a.dtype != DTypeOf<T>::value || a.dims.size() != 1 ||
        a.bytes.size() != static_cast<size_t>(a.dims[0]) * sizeof(T)) {
      throw BadDataError(detail::concat("tensor '", printable(a.name), "' has the wrong type or rank"));
    }
    values.resize(static_cast<size_t>(a.dims[0]));
    if (!values.empty()) std::memcpy(values.data(), a.bytes.data(), a.bytes.size());
  }

 private:
  const std::function<HostArray(const std::string&)>& find_;
  const std::function<bool(const std::string&)>& has_;
};

template <class T, class List>
void ragged(ArrayWriter& writer, const std::string& name, const std::vector<List>& lists) {
  std::vector<T> values;
  std::vector<int64_t> lengths;
  for (const List& list : lists) {
    lengths.push_back(static_cast<int64_t>(list.size()));
    for (const auto v : list) values.push_back(static_cast<T>(v));
  }
  writer.flat(name.c_str(), values);
  writer.flat((name + ".lengths").c_str(), lengths);
}

template <class T, class List>
void ragged(ArrayReader& reader, const std::string& name, std::vector<List>& lists) {
  std::vector<T> values;
  std::vector<int64_t> lengths;
  reader.flat(name.c_str(), values);
  reader.flat((name + ".lengths").c_str(), lengths);
  size_t used = 0;
  for (const int64_t n : lengths) {
    if (n < 0 || static_cast<uint64_t>(n) > values.size() - used) {
      throw BadDataError(
          detail::concat("tensor '", kRolloutPrefix, name, ".lengths' does not fit its values"));
    }
    List list;
    for (int64_t i = 0; i < n; ++i) {
      list.push_back(static_cast<typename List::value_type>(values[used++]));
    }
    lists.push_back(std::move(list));
  }
  if (used != values.size()) {
    throw BadDataError(detail::concat("tensor '", kRolloutPrefix, name, "' has ", values.size(),
                                      " values, its lengths sum to ", used));
  }
}

// A rollout's problems, field by field.
struct ProblemFields {
  std::vector<std::string> prompts, answers;
  std::vector<int64_t> limits;
  std::vector<uint8_t> conversations;
};

template <class T>
bool any(const std::vector<T>& values) {
  return std::any_of(values.begin(), values.end(), [](T v) { return v != 0; });
}

template <class Visitor, class RolloutRef>
void visit(Visitor& visitor, RolloutRef& r, ProblemFields& problems,
           std::vector<int64_t>& samples_per_prompt) {
  visitor.flat("samples_per_prompt", samples_per_prompt);
  ragged<uint8_t>(visitor, "problem_prompts", problems.prompts);
  ragged<uint8_t>(visitor, "problem_answers", problems.answers);
  if (visitor.wants("problem_limits", any(problems.limits))) visitor.flat("problem_limits", problems.limits);
  if (visitor.wants("problem_conversations", any(problems.conversations))) {
    visitor.flat("problem_conversations", problems.conversations);
  }
  ragged<int32_t>(visitor, "prompts", r.prompts);
  ragged<int32_t>(visitor, "completions", r.completions);
  ragged<float>(visitor, "log_probs", r.log_probs);
  ragged<float>(visitor, "old_log_probs", r.old_log_probs);
  ragged<float>(visitor, "reference_log_probs", r.reference_log_probs);
  if (visitor.wants("router", !r.router.empty())) ragged<uint8_t>(visitor, "router", r.router);
  visitor.flat("finished", r.finished);
  visitor.flat("verdicts", r.verdicts);
  ragged<float>(visitor, "reward_parts", r.reward_parts);
  visitor.flat("rewards", r.rewards);
  visitor.flat("advantages", r.advantages);
}

}  // namespace

std::vector<HostArray> rollout_to_arrays(const Rollout& rollout) {
  if (rollout.completions.empty() && rollout.prompts.empty()) return {};
  ProblemFields problems;
  for (const Problem& p : rollout.problems) {
    problems.prompts.push_back(p.prompt);
    problems.answers.push_back(p.answer);
    problems.limits.push_back(p.max_tokens);
    problems.conversations.push_back(p.conversation);
  }
  std::vector<int64_t> samples = {rollout.samples_per_prompt};
  ArrayWriter writer;
  visit(writer, rollout, problems, samples);
  return writer.arrays;
}

Rollout rollout_from_arrays(const std::function<HostArray(const std::string&)>& find,
                            const std::function<bool(const std::string&)>& has) {
  Rollout out;
  ProblemFields problems;
  std::vector<int64_t> samples;
  ArrayReader reader(find, has);
  visit(reader, out, problems, samples);
  const size_t count = problems.prompts.size();
  if (problems.limits.empty()) problems.limits.assign(count, 0);  // none has one
  if (problems.conversations.empty()) problems.conversations.assign(count, 0);
  if (samples.size() != 1 || problems.answers.size() != count || problems.limits.size() != count ||
      problems.conversations.size() != count) {
    throw BadDataError(detail::concat("tensors '", kRolloutPrefix, "*' disagree in their sizes"));
  }
  out.samples_per_prompt = samples[0];
  for (size_t i = 0; i < count; ++i) {
    out.problems.push_back({.prompt = std::move(problems.prompts[i]),
                            .answer = std::move(problems.answers[i]),
                            .max_tokens = problems.limits[i],
                            .conversation = problems.conversations[i] != 0});
  }
  return out;
}

}  // namespace fp4t
