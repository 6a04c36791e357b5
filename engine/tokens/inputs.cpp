#include "engine/tokens/inputs.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "kernels/base/check.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;

void add_file(const std::string& path, std::vector<std::string>& files) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) throw MissingInputError("data: '" + path + "' leads nowhere");
  if (!fs::is_regular_file(status)) throw BadDataError("data: '" + path + "' is no regular file");
  files.push_back(path);
}

// Links to folders are followed. `reached`: folders without links, to the path that led there first.
void add_folder(const std::string& path, std::map<std::string, std::string>& reached,
                std::vector<std::string>& files) {
  std::error_code error;
  const fs::path target = fs::canonical(path, error);
  if (error) throw MissingInputError("data: cannot list '" + path + "': " + error.message());
  const auto [first, is_new] = reached.emplace(target.string(), path);
  if (!is_new) {
    throw BadDataError("data: one folder is reached twice, as '" + first->second + "' and as '" + path + "'");
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
  if (error) throw MissingInputError("data: cannot list '" + path + "': " + error.message());
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

std::vector<std::string> expand(const std::string& pattern) {
  std::vector<std::string> files;
  std::error_code ignored;
  if (fs::exists(pattern, ignored)) {
    add_path(pattern, files);
  } else {
    std::vector<std::string> paths;
    glob_t matches{};
    if (::glob(pattern.c_str(), 0, nullptr, &matches) == 0) {
      for (size_t i = 0; i < matches.gl_pathc; ++i) paths.emplace_back(matches.gl_pathv[i]);
    }
    globfree(&matches);
    for (const std::string& path : paths) add_path(path, files);
  }
  std::sort(files.begin(), files.end());
  if (files.empty()) throw MissingInputError("data: no file matches '" + pattern + "'");
  return files;
}

}  // namespace

std::vector<std::string> input_files(const DataSourceSpec& spec) {
  std::vector<std::string> files;
  std::map<std::string, std::string> seen;  // by the path without links
  for (const std::string& pattern : spec.paths) {
    for (const std::string& path : expand(pattern)) {
      std::error_code error;
      const fs::path target = fs::canonical(path, error);
      const auto [first, is_new] = seen.emplace(error ? path : target.string(), path);
      if (!is_new) {
        throw BadDataError("data: source '" + spec.name + "' has one file twice, as '" + first->second +
                           "' and as '" + path + "'; what one holds out, the other would train on");
      }
      files.push_back(path);
    }
  }
  return files;
}

void check_inputs(const Recipe& recipe) {
  std::string missing, bad;
  const auto note = [](std::string& text, const std::string& line) {
    text += (text.empty() ? "" : "\n") + line;
  };
  const InitSpec& init = recipe.model.init;
  std::error_code ignored;
  if (init.kind == "import" && !fs::is_directory(init.path, ignored)) {
    note(missing, "model.init.path: '" + init.path + "' is no folder");
  }
  for (size_t i = 0; i < recipe.stages.size(); ++i) {
    const auto* pretrain = std::get_if<PretrainSpec>(&recipe.stages[i]);
    if (!pretrain) continue;
    for (size_t k = 0; k < pretrain->data.size(); ++k) {
      const DataSourceSpec& source = pretrain->data[k];
      if (source.kind != "text" && source.kind != "jsonl") continue;
      const std::string path = detail::concat("stages[", i, "].pretrain.data[", k, "].paths: ");
      try {
        input_files(source);
      } catch (const MissingInputError& e) {
        note(missing, path + e.what());
      } catch (const BadDataError& e) {
        note(bad, path + e.what());
      }
    }
  }
  if (!missing.empty()) throw MissingInputError(missing + (bad.empty() ? "" : "\n" + bad));
  if (!bad.empty()) throw BadDataError(bad);
}

}  // namespace fp4t
