// The precision tables: for every stage, table and span of steps a table of cells, one group of columns a run
// where runs differ.
#include <algorithm>
#include <map>
#include <set>

#include "engine/metrics/report.h"

namespace fp4t {

namespace {

using Json = nlohmann::ordered_json;

struct FormatCell {
  std::string format, text;
  bool operator==(const FormatCell&) const = default;
};
// By layer (-1: the model's own) and row.
using LayerCells = std::map<int64_t, std::map<std::string, FormatCell>>;

struct SpanTable {
  std::string stage, table;
  int64_t begin = 0, end = 0;
  LayerCells cells;
  std::vector<std::string> rows;  // in the plan's order
};

std::string row_name(const Json& cell) {
  std::string name = text_value(cell, "module");
  for (const char* part : {"gemm", "operand"}) {
    const std::string text = text_value(cell, part);
    if (!text.empty()) name += " " + text;
  }
  return name;
}

SpanTable read_span(const Json& json, const std::string& stage) {
  SpanTable t;
  t.stage = stage;
  t.table = text_value(json, "table");
  t.begin = json.at("begin").get<int64_t>();
  t.end = json.at("end").get<int64_t>();
  for (const Json& cell : json.at("cells")) {
    const std::string name = row_name(cell), format = text_value(cell, "format"),
                      text = text_value(cell, "cell");
    if (std::find(t.rows.begin(), t.rows.end(), name) == t.rows.end()) t.rows.push_back(name);
    const int64_t layer = cell.at("layer").is_number() ? cell["layer"].get<int64_t>() : -1;
    t.cells[layer][name] = {format, text.empty() ? format : text};
  }
  return t;
}

std::vector<SpanTable> read_tables(const RunData& run) {
  std::vector<SpanTable> tables;
  if (!run.plan.is_object() || !run.plan.contains("stages")) return tables;
  for (const Json& stage : run.plan["stages"]) {
    for (const Json& table : stage.value("precision", Json::array())) {
      tables.push_back(read_span(table, text_value(stage, "name")));
    }
  }
  return tables;
}

// The tables of all runs that are in force from `begin` on; null where a run has none.
struct Beside {
  std::string stage, table;
  int64_t begin = 0, end = 0;
  std::vector<const SpanTable*> of_run;

  bool all_equal() const {
    return std::all_of(of_run.begin(), of_run.end(),
                       [&](const SpanTable* t) { return t && of_run[0] && t->cells == of_run[0]->cells; });
  }
  const FormatCell* cell(size_t run, int64_t layer, const std::string& row) const {
    if (!of_run[run]) return nullptr;
    const auto cells = of_run[run]->cells.find(layer);
    if (cells == of_run[run]->cells.end()) return nullptr;
    const auto it = cells->second.find(row);
    return it == cells->second.end() ? nullptr : &it->second;
  }
  bool differs(int64_t layer, const std::string& row) const {
    const FormatCell* first = cell(0, layer, row);
    for (size_t r = 1; r < of_run.size(); ++r) {
      const FormatCell* other = cell(r, layer, row);
      if (!first != !other || (first && !(*first == *other))) return true;
    }
    return false;
  }
};

// Cut at the steps where any run's table changes.
std::vector<Beside> put_beside(const std::vector<std::vector<SpanTable>>& tables) {
  std::vector<std::pair<std::string, std::string>> names;  // stage and table, in order
  std::map<std::pair<std::string, std::string>, std::set<int64_t>> cuts;
  for (const auto& of_run : tables) {
    for (const SpanTable& t : of_run) {
      const std::pair name{t.stage, t.table};
      if (!cuts.count(name)) names.push_back(name);
      cuts[name].insert({t.begin, t.end});
    }
  }
  std::vector<Beside> list;
  for (const auto& name : names) {
    const std::set<int64_t>& steps = cuts[name];
    for (auto it = steps.begin(); it != steps.end() && std::next(it) != steps.end(); ++it) {
      Beside b{name.first, name.second, *it, *std::next(it), {}};
      for (const auto& of_run : tables) {
        b.of_run.push_back(nullptr);
        for (const SpanTable& t : of_run) {
          if (t.stage == b.stage && t.table == b.table && t.begin <= b.begin && b.begin < t.end)
            b.of_run.back() = &t;
        }
      }
      list.push_back(std::move(b));
    }
  }
  return list;
}

// Spans of layers, ends included, in which no run's cells change.
std::vector<std::pair<int64_t, int64_t>> layer_spans(const Beside& b) {
  std::set<int64_t> layers;
  for (const SpanTable* t : b.of_run) {
    for (const auto& [layer, cells] : t ? t->cells : LayerCells()) layers.insert(layer);
  }
  const auto same = [&](int64_t x, int64_t y) {
    return std::all_of(b.of_run.begin(), b.of_run.end(), [&](const SpanTable* t) {
      if (!t) return true;
      const auto a = t->cells.find(x), c = t->cells.find(y);
      return a != t->cells.end() && c != t->cells.end() && a->second == c->second;
    });
  };
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (const int64_t layer : layers) {
    if (!spans.empty() && spans.back().second >= 0 && layer == spans.back().second + 1 &&
        same(spans.back().second, layer)) {
      spans.back().second = layer;
    } else {
      spans.emplace_back(layer, layer);
    }
  }
  return spans;
}

std::string span_name(const std::pair<int64_t, int64_t>& span) {
  if (span.first < 0) return "model";
  if (span.first == span.second) return "layer " + std::to_string(span.first);
  return "layers " + std::to_string(span.first) + " to " + std::to_string(span.second);
}

std::string cell_html(const FormatCell* cell, bool differs) {
  static const std::set<std::string> kFormats = {"bf16", "mxfp8", "nvfp4", "fp32"};
  const std::string format = cell && kFormats.count(cell->format) ? cell->format : "";
  const std::string classes = differs ? (format.empty() ? "differs" : format + " differs") : format;
  return "<td" + (classes.empty() ? "" : " class=\"" + classes + "\"") + ">" +
         (differs ? "<b class=\"ne\" title=\"differs between the runs\">&ne;</b> " : "") +
         (cell ? html_escape(cell->text) : "") + "</td>";
}

std::string table_html(const Runs& runs, const Beside& b) {
  const bool apart = runs.size() > 1 && !b.all_equal();
  const size_t groups = apart ? runs.size() : 1;
  const auto spans = layer_spans(b);
  std::vector<std::string> rows;
  for (const SpanTable* t : b.of_run) {
    for (const std::string& row : t ? t->rows : std::vector<std::string>()) {
      if (std::find(rows.begin(), rows.end(), row) == rows.end()) rows.push_back(row);
    }
  }
  std::string heads, names;
  for (size_t g = 0; g < groups; ++g) {
    heads += "<th colspan=\"" + std::to_string(spans.size()) + "\" scope=\"colgroup\">" + run_mark(runs, g) +
             (b.of_run[g] ? "" : ": has no such table") + "</th>";
    for (const auto& span : spans) names += "<th scope=\"col\">" + span_name(span) + "</th>";
  }
  std::string body;
  for (const std::string& row : rows) {
    std::string cells;
    bool any = false;
    for (size_t g = 0; g < groups; ++g) {
      for (const auto& span : spans) {
        const bool differs = apart && b.differs(span.first, row);
        any = any || differs;
        cells += cell_html(b.cell(g, span.first, row), differs);
      }
    }
    body += "<tr><th scope=\"row\">" + html_escape(row) + (any ? " <span class=\"ne\">&ne;</span>" : "") +
            "</th>" + cells + "</tr>";
  }
  const std::string caption =
      html_escape(b.stage + ": " + b.table) + ", steps " + grouped(b.begin) + " to " + grouped(b.end);
  return "<h3>" + caption + (runs.size() > 1 && !apart ? " (the same in all runs)" : "") +
         "</h3><div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"" + caption +
         "\"><table><thead>" + (apart ? "<tr><th></th>" + heads + "</tr>" : "") + "<tr><th></th>" + names +
         "</tr></thead><tbody>" + body + "</tbody></table></div>";
}

}  // namespace

std::string precision_tables(const Runs& runs) {
  std::vector<std::vector<SpanTable>> tables;
  for (const RunData& run : runs) tables.push_back(read_tables(run));
  std::string out;
  for (const Beside& b : put_beside(tables)) out += table_html(runs, b);
  return out;
}

}  // namespace fp4t
