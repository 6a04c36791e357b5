// Problems from files of JSON lines: a prompt and an answer a row, as GSM8K-style sets have them. A row is
// held out by a draw of its prompt, so rows with equal prompts are on one side, whatever their place in the
// files.
#include <filesystem>
#include <sstream>

#include "engine/metrics/json_line.h"
#include "engine/tokens/answers.h"
#include "engine/tokens/conversation.h"
#include "engine/tokens/generated_tasks.h"
#include "engine/tokens/hash.h"
#include "engine/tokens/inputs.h"
#include "engine/tokens/permutation.h"
#include "engine/tokens/tokenizer.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

using Json = nlohmann::json;

struct Row {
  Problem problem;
  std::string place;  // "file:line"
};

struct Rows {
  std::vector<Row> list;
  std::string hash;  // over names without folders, and contents
};

// Whether an object has a key twice, of which the parser would keep the last.
bool holds_twice(const std::string& object, const std::string& key) {
  const std::string quoted = Json(key).dump(-1, ' ', false, Json::error_handler_t::replace);
  const size_t first = object.find(quoted);
  // Texts and inner objects may hold the word, too: only then is it worth a second look.
  if (first == std::string::npos || object.find(quoted, first + 1) == std::string::npos) return false;
  int64_t found = 0;
  const auto count = [&](int depth, Json::parse_event_t event, Json& value) {
    found += event == Json::parse_event_t::key && depth == 1 && value == key;
    return true;
  };
  const Json whole = Json::parse(object, count);
  return whole.is_object() && found > 1;
}

// Reads the rows of one file.
class RowReader {
 public:
  RowReader(const TaskSpec& spec, const AnswerReader& answers) : spec_(spec), answers_(answers) {}

  void read(const std::string& path, std::vector<Row>& rows) {
    std::string content = read_text_file(path);
    hash_ += std::filesystem::path(path).filename().string() + " " + std::to_string(content.size()) + " " +
             xxh3_hex(content) + "\n";
    if (content.rfind("\xEF\xBB\xBF", 0) == 0) content.erase(0, 3);  // a byte order mark
    std::istringstream lines(content);
    std::string line;
    for (int64_t number = 1; std::getline(lines, line); ++number) {
      if (!line.empty() && line.back() == '\r') line.pop_back();
      if (line.find_first_not_of(" \t") == std::string::npos) continue;
      place_ = detail::concat(printable(path), ":", number);
      const Json object = parse_json_line(line, path, number);
      if (!object.is_object()) refuse("no object");
      for (const std::string* key : {&spec_.prompt_field, &spec_.answer_field, &spec_.limit_field}) {
        if (!key->empty() && holds_twice(line, *key)) refuse("key '" + printable(*key) + "' twice");
      }
      rows.push_back({problem_of(object), place_});
    }
  }
  const std::string& hash() const { return hash_; }

 private:
  [[noreturn]] void refuse(const std::string& what) const { throw BadDataError(place_ + ": " + what); }

  const Json& member(const Json& object, const std::string& key) const {
    const auto it = object.find(key);
    if (it == object.end()) refuse("no key '" + printable(key) + "'");
    return *it;
  }

  void read_prompt(const Json& prompt, Problem& problem) const {
    const std::string name = "'" + printable(spec_.prompt_field) + "'";
    problem.conversation = prompt.is_array();
    if (problem.conversation) {
      if (spec_.prompt_template != "{prompt}") {
        refuse(name + " is a list of messages; allowed with a template: a text");
      }
      try {
        problem.prompt = conversation_json(read_conversation(prompt.dump()));
      } catch (const BadDataError& e) {
        refuse(name + ": " + e.what());
      }
      return;
    }
    if (!prompt.is_string()) refuse(name + " is neither a text nor a list of messages");
    problem.prompt = prompt.get<std::string>();
    if (problem.prompt.empty()) refuse(name + " is empty");
  }

  Problem problem_of(const Json& object) const {
    Problem problem;
    read_prompt(member(object, spec_.prompt_field), problem);
    const Json& answer = member(object, spec_.answer_field);
    if (!answer.is_string() && !answer.is_number()) {
      refuse("'" + printable(spec_.answer_field) + "' is neither a text nor a number");
    }
    try {
      problem.answer = answers_.of_data(answer.is_string() ? answer.get<std::string>() : answer.dump());
    } catch (const BadDataError& e) {
      refuse(e.what());
    }
    if (!spec_.limit_field.empty() && object.contains(spec_.limit_field)) {
      const Json& limit = object[spec_.limit_field];
      if (!limit.is_number_integer() || limit.get<int64_t>() < 1) {
        refuse("'" + printable(spec_.limit_field) + "' is no whole number of tokens above 0");
      }
      problem.max_tokens = limit.get<int64_t>();
    }
    return problem;
  }

  const TaskSpec& spec_;
  const AnswerReader& answers_;
  std::string place_, hash_;
};

Rows read_rows(const TaskSpec& spec, const AnswerReader& answers) {
  Rows rows;
  DataSourceSpec files;
  files.name = "task";
  files.paths = spec.paths;
  RowReader reader(spec, answers);
  for (const std::string& path : input_files(files)) reader.read(path, rows.list);
  if (rows.list.empty()) throw BadDataError("the task's files hold no row");
  rows.hash = xxh3_hex(reader.hash());
  return rows;
}

bool is_held_out(const HeldOutSpec& spec, const std::string& prompt) {
  const std::string hash = xxh3_hex(std::to_string(spec.seed) + "|" + prompt);
  return static_cast<double>(std::stoull(hash.substr(0, 12), nullptr, 16)) * 0x1p-48 < spec.fraction;
}

class JsonlTask : public Task {
 public:
  explicit JsonlTask(const TaskSpec& spec) : spec_(spec), answers_(spec.answer) {
    const Rows rows = read_rows(spec, answers_);
    for (const Row& row : rows.list) {
      (is_held_out(spec.held_out, row.problem.prompt) ? held_out_ : training_).push_back(row.problem);
    }
    fingerprint_ = xxh3_hex(detail::concat(
        rows.hash, "|", spec.prompt_field, "|", spec.answer_field, "|", spec.limit_field, "|",
        spec.prompt_template, "|", spec.answer.form, "|", spec.answer.gold, "|", spec.answer.pattern, "|",
        spec.answer.compare, "|", spec.held_out.fraction, "|", spec.held_out.seed));
    if (held_out_.empty() && spec.held_out.fraction > 0) {
      throw BadDataError(detail::concat("held_out.fraction ", spec.held_out.fraction,
                                        " holds out none of the ", rows.list.size(),
                                        " rows; give more, or another held_out.seed"));
    }
    if (training_.empty() && spec.held_out.fraction < 1) {
      throw BadDataError(detail::concat("held_out.fraction ", spec.held_out.fraction,
                                        " holds out all of the ", rows.list.size(),
                                        " rows; give less, or another held_out.seed"));
    }
  }

  std::string name() const override { return "jsonl"; }

  // Each pass over the rows has an order of its own.
  Problem training(PhiloxKey key, int64_t i) const override {
    if (training_.empty()) throw BadDataError("jsonl: no row is left for training");
    const auto n = static_cast<int64_t>(training_.size());
    const PhiloxBits pass = site_draw(key, static_cast<uint64_t>(i / n));
    return training_[static_cast<size_t>(permuted_index({pass.word[0], pass.word[1]}, n, i % n))];
  }

  std::vector<Problem> held_out() const override { return held_out_; }

  std::string held_out_hash() const override {
    std::string text;
    for (const Problem& p : held_out_) text += xxh3_hex(p.prompt) + xxh3_hex(p.answer);
    return xxh3_hex(text);
  }
  std::string fingerprint() const override { return fingerprint_; }

  Verdict verify(const Problem& problem, const std::string& completion, bool finished) const override {
    if (!finished) return Verdict::kUnverifiable;
    const std::optional<std::string> given = answers_.of_completion(completion);
    if (!given) return Verdict::kUnverifiable;
    const std::optional<bool> equal = answers_.equal(*given, problem.answer);
    if (!equal) return Verdict::kUnverifiable;
    return *equal ? Verdict::kRight : Verdict::kWrong;
  }

  std::string document(const Problem& problem, bool, uint32_t) const override {
    return prompt_text(spec_, problem) + problem.answer + "\n";
  }

 private:
  TaskSpec spec_;
  AnswerReader answers_;
  std::vector<Problem> training_, held_out_;
  std::string fingerprint_;
};

}  // namespace

std::unique_ptr<Task> make_jsonl_task(const TaskSpec& spec) { return std::make_unique<JsonlTask>(spec); }

SplitRows split_rows(const TaskSpec& spec) {
  SplitRows split;
  for (const Row& row : read_rows(spec, AnswerReader(spec.answer)).list) {
    (is_held_out(spec.held_out, row.problem.prompt) ? split.held_out : split.training)
        .push_back({row.problem.prompt, row.place});
  }
  return split;
}

void check_rows(const TaskSpec& spec, const Tokenizer& tokenizer) {
  const AnswerReader answers(spec.answer);
  for (const Row& row : read_rows(spec, answers).list) {
    size_t tokens = 0;
    try {
      tokens = prompt_tokens(spec, tokenizer, row.problem).size();
    } catch (const BadDataError& e) {
      throw BadDataError(row.place + ": " + e.what());
    }
    if (tokens == 0) throw BadDataError(row.place + ": a prompt of no token");
    if (tokens <= static_cast<size_t>(spec.max_prompt_tokens)) continue;
    throw BadDataError(detail::concat(row.place, ": a prompt of ", tokens, " tokens; max_prompt_tokens is ",
                                      spec.max_prompt_tokens));
  }
}

}  // namespace fp4t
