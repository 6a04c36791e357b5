#include "engine/tokens/inputs.h"

#include <glob.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>

#include "engine/tokens/documents.h"
#include "engine/tokens/generated_tasks.h"
#include "engine/tokens/tasks.h"
#include "engine/tokens/token_store.h"
#include "engine/tokens/tokenizer.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;

void add_file(const std::string& path, std::vector<std::string>& files) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) {
    const bool gone = status.type() == fs::file_type::not_found;
    throw MissingInputError("'" + printable(path) + "' " +
                            (gone ? "leads nowhere" : "cannot be read: " + error.message()));
  }
  if (!fs::is_regular_file(status)) throw BadDataError("'" + printable(path) + "' is no regular file");
  files.push_back(path);
}

// Links to folders are followed. `reached`: folders without links, to the path that led there first.
void add_folder(const std::string& path, std::map<std::string, std::string>& reached,
                std::vector<std::string>& files) {
  std::error_code error;
  const fs::path target = fs::canonical(path, error);
  if (error) throw MissingInputError("cannot list '" + printable(path) + "': " + error.message());
  const auto [first, is_new] = reached.emplace(target.string(), path);
  if (!is_new) {
    throw BadDataError("one folder is reached twice, as '" + printable(first->second) + "' and as '" +
                       printable(path) + "'");
  }
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    const std::string inner = it->path().string();
    if (it->is_directory(ignored)) {
      add_folder(inner, reached, files);
    } else {
      add_file(inner, files);
    }
  }
  if (error) throw MissingInputError("cannot list '" + printable(path) + "': " + error.message());
}

void add_path(const std::string& path, std::vector<std::string>& files) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    std::map<std::string, std::string> reached;
    add_folder(path, reached, files);
  } else {
    add_file(path, files);
  }
}

// A pair of Megatron's files may be named by what their names have in common.
std::string index_of(const DataSourceSpec& spec, const std::string& pattern) {
  std::error_code ignored;
  const bool is_prefix =
      spec.kind == "megatron" && !fs::exists(pattern, ignored) && fs::exists(pattern + ".idx", ignored);
  return is_prefix ? pattern + ".idx" : pattern;
}

std::vector<std::string> expand(const std::string& pattern) {
  std::vector<std::string> files;
  std::error_code error;
  if (fs::exists(pattern, error)) {
    add_path(pattern, files);
  } else {
    std::vector<std::string> paths;
    glob_t matches{};
    const int result = ::glob(pattern.c_str(), GLOB_ERR, nullptr, &matches);
    const int reason = errno;
    for (size_t i = 0; result == 0 && i < matches.gl_pathc; ++i) paths.emplace_back(matches.gl_pathv[i]);
    globfree(&matches);
    if (result == GLOB_ABORTED) {
      throw MissingInputError("cannot list the folders of '" + printable(pattern) +
                              "': " + std::strerror(reason));
    }
    if (paths.empty() && error)
      throw MissingInputError("'" + printable(pattern) + "' cannot be read: " + error.message());
    for (const std::string& path : paths) add_path(path, files);
  }
  std::sort(files.begin(), files.end());
  if (files.empty()) throw MissingInputError("no file matches '" + printable(pattern) + "'");
  return files;
}

}  // namespace

std::vector<std::string> input_files(const DataSourceSpec& spec) {
  std::vector<std::string> files;
  std::map<std::string, std::string> seen;  // by the path without links
  for (const std::string& pattern : spec.paths) {
    for (const std::string& path : expand(index_of(spec, pattern))) {
      std::error_code error;
      const fs::path target = fs::canonical(path, error);
      const auto [first, is_new] = seen.emplace(error ? path : target.string(), path);
      if (!is_new) {
        throw BadDataError("source '" + printable(spec.name) + "' has one file twice, as '" +
                           printable(first->second) + "' and as '" + printable(path) +
                           "'; what one holds out, the other would train on");
      }
      files.push_back(path);
    }
  }
  return files;
}

namespace {

// What is wrong with one source or task; `key` goes behind its path.
struct Finding {
  ExitCode code;
  std::string key, message;
};
using Findings = std::vector<Finding>;

// Notes what `body` throws; true when it throws nothing.
template <class Body>
bool passes(Findings& found, const std::string& key, const Body& body) {
  try {
    body();
    return true;
  } catch (const Error& e) {
    if (e.code() == ExitCode::kInternal) throw;
    found.push_back({e.code(), key, e.what()});
    return false;
  }
}

Findings check_files(const DataSourceSpec& source, const Tokenizer& tokenizer) {
  Findings found;
  std::unique_ptr<TokenStore> store;
  if (!passes(found, ".paths", [&] { input_files(source); })) return found;
  if (!passes(found, "", [&] { store = open_token_store(source, tokenizer); })) return found;
  passes(found, "", [&] { store->check_tokens(); });
  passes(found, ".held_out", [&] { held_out_documents(source, static_cast<size_t>(store->documents())); });
  return found;
}

// `trains`: problems beyond the held-out ones are drawn, too.
Findings check_task(TaskSpec spec, bool trains, const Tokenizer& tokenizer) {
  Findings found;
  HeldOutSpec held_out = spec.held_out;
  spec.held_out.hash.clear();  // told apart: it has a key of its own
  passes(found, "", [&] {
    const std::unique_ptr<Task> task = make_task(spec);
    const std::string difference = held_out_difference(*task, held_out);
    if (!difference.empty()) found.push_back({ExitCode::kBadData, ".held_out.hash", difference});
    std::vector<Problem> problems = task->held_out();
    if (problems.size() > 1) problems.resize(1);
    if (trains) problems.push_back(task->training({}, 0));
    if (spec.kind == "jsonl") {
      check_rows(spec, tokenizer);
    } else {
      for (const Problem& p : problems) tokenizer.encode(task->document(p, false, 0));
    }
  });
  return found;
}

// Stages share most of their sources and tasks: each is made once.
template <class Spec>
class Known {
 public:
  template <class Check>
  const Findings& of(const Spec& spec, bool trains, const Check& check) {
    for (const Entry& e : entries_) {
      if (e.spec == spec && e.trains == trains) return e.findings;
    }
    entries_.push_back({spec, trains, check()});
    return entries_.back().findings;
  }

 private:
  struct Entry {
    Spec spec;
    bool trains;
    Findings findings;
  };
  std::deque<Entry> entries_;
};

class InputCheck {
 public:
  InputCheck(const Recipe& recipe, const FieldPlaces& places)
      : recipe_(recipe), places_(places), tokenizer_(make_tokenizer(recipe.tokenizer)) {}

  void run() {
    for (size_t i = 0; i < recipe_.stages.size(); ++i) {
      const std::string path = detail::concat("stages[", i, "].");
      if (const auto* pretrain = std::get_if<PretrainSpec>(&recipe_.stages[i])) {
        sources(path + "pretrain.data", pretrain->data);
        eval(path + "pretrain.eval", pretrain->eval);
      } else {
        const RlSpec& rl = std::get<RlSpec>(recipe_.stages[i]);
        task(path + "rl.task", rl.task, true);
        end_tokens(path + "rl.sampling.end_tokens", rl.sampling.end_tokens);
        eval(path + "rl.eval", rl.eval);
      }
    }
    if (text_.empty()) held_out_rows_are_not_trained_on();
    throw_if_any();
  }

 private:
  void sources(const std::string& path, const std::vector<DataSourceSpec>& list) {
    shared_files(path, list);
    for (size_t k = 0; k < list.size(); ++k) {
      const std::string at = detail::concat(path, "[", k, "]");
      if (has_documents(list[k].kind)) {
        DataSourceSpec spec = list[k];
        spec.weight = 1;  // does not matter here
        add_all(at, known_sources_.of(spec, true, [&] { return check_files(spec, *tokenizer_); }));
      } else if (list[k].kind != "random") {
        task(at, task_of(list[k]), true);
      }
    }
  }
  // A file that one source holds documents of out of training must not be trained on by another.
  void shared_files(const std::string& path, const std::vector<DataSourceSpec>& list) {
    std::map<std::string, size_t> first;  // source of each file, by the path without links
    for (size_t k = 0; k < list.size(); ++k) {
      if (!has_documents(list[k].kind)) continue;
      Findings found;
      std::vector<std::string> files;
      try {
        files = input_files(list[k]);
      } catch (const Error&) {
        continue;  // told of with the source itself
      }
      for (const std::string& file : files) {
        std::error_code error;
        const fs::path target = fs::canonical(file, error);
        const auto [it, is_new] = first.emplace(error ? file : target.string(), k);
        const DataSourceSpec& other = list[it->second];
        if (is_new || it->second == k) continue;
        if (list[k].held_out.fraction == 0 && other.held_out.fraction == 0) continue;
        found.push_back({ExitCode::kBadData, ".paths",
                         "'" + printable(file) + "' is also a file of source '" + printable(other.name) +
                             "'; what one holds out, the other would train on"});
        break;
      }
      add_all(detail::concat(path, "[", k, "]"), found);
    }
  }
  // Rows that accuracy is measured on must not be trained on, whatever their files are called: in any stage,
  // as stages follow each other.
  void held_out_rows_are_not_trained_on() {
    std::map<std::string, std::string> trained;  // prompts to where they stand
    for (const auto& stage : recipe_.stages) {
      const auto* rl = std::get_if<RlSpec>(&stage);
      if (!rl || rl->task.kind != "jsonl") continue;
      for (const SplitRows::Row& row : split_rows(rl->task).training) trained.emplace(row.prompt, row.place);
    }
    for (size_t i = 0; i < recipe_.stages.size() && !trained.empty(); ++i) {
      const auto* rl = std::get_if<RlSpec>(&recipe_.stages[i]);
      const EvalSpec& eval = rl ? rl->eval : std::get<PretrainSpec>(recipe_.stages[i]).eval;
      if (!eval.task || eval.task->kind != "jsonl") continue;
      const SplitRows split = split_rows(*eval.task);
      std::string first;
      int64_t both = 0;
      for (const SplitRows::Row& row : split.held_out) {
        const auto it = trained.find(row.prompt);
        if (it != trained.end() && ++both == 1) first = row.place + ", trained on from " + it->second;
      }
      if (both == 0) continue;
      add(detail::concat("stages[", i, rl ? "].rl" : "].pretrain", ".eval.task"),
          {ExitCode::kBadData, "",
           detail::concat(both, " of ", split.held_out.size(),
                          " prompts that accuracy is measured on are trained on, too; the first: ", first)});
    }
  }
  void task(const std::string& path, TaskSpec spec, bool trains) {
    spec.permute_rewards = false;  // does not matter here
    add_all(path, known_tasks_.of(spec, trains, [&] { return check_task(spec, trains, *tokenizer_); }));
  }
  void eval(const std::string& path, const EvalSpec& spec) {
    if (spec.task) task(path + ".task", *spec.task, false);
    end_tokens(path + ".end_tokens", spec.end_tokens);
    for (size_t k = 0; k < spec.prompts.size(); ++k) {
      const std::string at = detail::concat(path, ".prompts[", k, "]");
      Findings found;
      passes(found, "", [&] {
        if (tokenizer_->prompt(spec.prompts[k]).empty()) throw RecipeError("no token to continue");
      });
      for (Finding& f : found) f.code = ExitCode::kRecipe;
      add_all(at, found);
    }
  }
  void end_tokens(const std::string& path, const std::vector<std::string>& texts) {
    for (size_t k = 0; k < texts.size(); ++k) {
      Findings found;
      passes(found, "", [&] { tokenizer_->single_token(texts[k]); });
      add_all(detail::concat(path, "[", k, "]"), found);
    }
  }

  void add_all(const std::string& path, const Findings& findings) {
    for (const Finding& f : findings) add(path + f.key, f);
  }
  void add(const std::string& path, const Finding& finding) {
    const SourcePlace place = nearest_place(places_, path);
    const std::string where = place.file.empty() ? path : place_text(place) + ": " + path;
    text_ += (text_.empty() ? "" : "\n") + where + ": " + printable(finding.message, 4000);
    any_recipe_ |= finding.code == ExitCode::kRecipe;
    any_missing_ |= finding.code == ExitCode::kMissingInput;
  }
  void throw_if_any() const {
    if (text_.empty()) return;
    if (any_recipe_) throw RecipeError(text_);
    if (any_missing_) throw MissingInputError(text_);
    throw BadDataError(text_);
  }

  const Recipe& recipe_;
  const FieldPlaces& places_;
  std::unique_ptr<Tokenizer> tokenizer_;
  Known<DataSourceSpec> known_sources_;
  Known<TaskSpec> known_tasks_;
  std::string text_;
  bool any_recipe_ = false, any_missing_ = false;
};

}  // namespace

void check_inputs(const Recipe& recipe, const FieldPlaces& places) { InputCheck(recipe, places).run(); }

}  // namespace fp4t
