// The report: what it shows of one run and of several, and what hostile files make of it.
#include <cmath>

#include "engine/metrics/svg.h"
#include "kernels/base/check.h"
#include "tests/support/messages.h"
#include "tests/unit/metrics_fixture.h"

namespace fp4t {
namespace {

namespace fs = std::filesystem;

using ReportTest = MetricsTest;

TEST_F(ReportTest, a_report_of_damaged_files_names_file_and_line) {
  const auto refusal = [&] {
    try {
      write_report(dir_);
    } catch (const BadDataError& e) {
      return std::string(e.what());
    }
    return std::string("not refused");
  };
  for (const char* damaged : kDamaged) {
    fs::remove_all(dir_);
    { MetricsWriter(dir_, 0, R"({"kind":"header"})").write("step", "s", 1, 1, record(1)); }
    EXPECT_NO_THROW(write_report(dir_));
    std::ofstream(dir_ + "/metrics.jsonl", std::ios::app) << damaged << "\n";
    EXPECT_NE(refusal().find("metrics.jsonl:3: "), std::string::npos) << damaged << ": " << refusal();
  }
  fs::remove_all(dir_);
  { MetricsWriter(dir_, 0, R"({"kind":"header"})").write("step", "s", 1, 1, record(1)); }
  for (const char* name : {"summary.json", "plan.json", "metrics.jsonl"}) {
    fs::remove_all(dir_ + "/" + name);
    fs::create_directory(dir_ + "/" + name);
    EXPECT_NE(refusal().find(std::string(name) + " is no regular file"), std::string::npos) << refusal();
    fs::remove(dir_ + "/" + name);
    std::ofstream(dir_ + "/" + name) << "[]\n";
    EXPECT_NE(refusal().find(name), std::string::npos) << refusal();
    fs::remove(dir_ + "/" + name);
  }
}

// /proc/self/mem is a regular file that cannot be read (EIO), as on a failing disk: not the end of a file.
TEST_F(ReportTest, a_file_that_cannot_be_read_is_no_empty_one) {
  const std::string unreadable = "/proc/self/mem";
  const auto refusal = [&] { return test::message_of<BadDataError>([&] { write_report(dir_); }); };
  { MetricsWriter(dir_, 0, R"({"kind":"header"})").write("step", "s", 1, 1, record(1)); }
  for (const char* name : {"times.jsonl", "metrics.jsonl"}) {
    fs::rename(dir_ + "/" + name, dir_ + "/kept");
    fs::create_symlink(unreadable, dir_ + "/" + name);
    EXPECT_SAYS(refusal(), "cannot read ", name);
    if (std::string(name) == "times.jsonl") {
      EXPECT_SAYS(test::message_of<BadDataError>([&] { MetricsWriter(dir_, 2, ""); }), "cannot read ", name);
    }
    fs::remove(dir_ + "/" + name);
    fs::rename(dir_ + "/kept", dir_ + "/" + name);
  }
  fs::create_directories(dir_ + "/rollouts/stage-0-step-9.jsonl");
  fs::create_symlink(unreadable, dir_ + "/rollouts/stage-0-step-1.jsonl");
  write_report(dir_);
  EXPECT_SAYS(read("report.html"), "stage-0-step-9.jsonl is no regular file; it is left out",
              "stage-0-step-1.jsonl: Input/output error; it is left out");
  fs::remove_all(dir_ + "/rollouts");
  std::ofstream(dir_ + "/rollouts") << "no folder";
  write_report(dir_);
  EXPECT_SAYS(read("report.html"), "cannot list ", "rollouts: Not a directory");
}

TEST_F(ReportTest, brackets_without_end_are_refused) {
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  for (const std::string& file :
       {std::string("plan.json"), std::string("summary.json"), std::string("metrics.jsonl")}) {
    fs::remove_all(dir_);
    { MetricsWriter(dir_, 0, R"({"kind":"header"})").write("step", "s", 1, 1, record(1)); }
    std::ofstream(dir_ + "/" + file, std::ios::app)
        << R"({"kind":"header","recipe":{"a":)" << deep << "},\"x\":" << deep << "}\n";
    EXPECT_THROW(write_report(dir_), BadDataError) << file;
  }
}

TEST_F(ReportTest, charts_and_report_survive_any_values) {
  EXPECT_EQ(line_chart("t", "x", {{"a", {{1, NAN}}, false}}), "");
  const std::string svg = line_chart("a<b", "x", {{"s", {{1, 5}, {2, INFINITY}, {3, 5}}, true}});
  EXPECT_NE(svg.find("a&lt;b"), std::string::npos);
  EXPECT_NE(svg.find(" d=\"M"), std::string::npos);
  // Values that differ by less than a double can divide end, and at once.
  for (const double y : {1e299, 1e-320, 1e16}) {
    EXPECT_NE(line_chart("t", "x", {{"s", {{1, y}, {2, y * (1 + 1e-16)}, {3e15, y}}}}), "");
  }
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  EXPECT_THROW(write_report(dir_), MissingInputError);
  {
    MetricsWriter w(dir_, 0, R"j({"kind":"header","name":"<script>alert(1)"})j");
    MetricsRecord r = record(3);
    r.lists.emplace_back("expert_load.0", std::vector<double>{0, 0});
    w.write("step", "pretrain", 1, 1, r);
    w.write("step", "pretrain", 2, 2, record(NAN));
  }
  write_report(dir_);
  const std::string html = read("report.html");
  EXPECT_EQ(html.find("<script>alert"), std::string::npos);
  EXPECT_NE(html.find("&lt;script&gt;alert"), std::string::npos);
  EXPECT_NE(html.find("<svg"), std::string::npos);
  EXPECT_EQ(html.find("nan "), std::string::npos);
  // A process that was killed tears its last line; the report shows the others, and says so.
  std::ofstream(dir_ + "/metrics.jsonl", std::ios::app) << R"({"kind":"st)";
  write_report(dir_);
  EXPECT_NE(read("report.html").find("the last line of metrics.jsonl is cut"), std::string::npos);
  std::ofstream(dir_ + "/metrics.jsonl", std::ios::app) << "\n";
  EXPECT_THROW(write_report(dir_), BadDataError);
}

const char* const kPlan = R"({
 "device": "cpu",
 "model": {"layers": 3, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "vocabulary": 257, "experts": 4,
           "expert_hidden": 32, "top_k": 2},
 "parameters": {"total": 1840512, "active": 627968},
 "recipe": {"run.name": "half", "stages[0].pretrain.steps": "1000"},
 "stages": [{"name": "first", "kind": "pretrain", "steps": 1000, "tokens": 2048000, "precision": [
   {"table": "pretrain.forward", "begin": 0, "end": 1000, "cells": [
     {"layer": 0, "module": "attn.qkv", "gemm": "fprop", "operand": "act", "format": "mxfp8", "cell": "mxfp8"},
     {"layer": 1, "module": "attn.qkv", "gemm": "fprop", "operand": "act", "format": "mxfp8", "cell": "mxfp8"},
     {"layer": 2, "module": "attn.qkv", "gemm": "fprop", "operand": "act", "format": "nvfp4", "cell": "nvfp4 1x16 rne"},
     {"layer": null, "module": "embed", "format": "bf16", "cell": "bf16"}]}]},
  {"name": "second", "kind": "rl", "steps": 7, "equal_bits": false, "equality_obstacle": "cell & <x>", "precision": []}]})";

// Everything that the report promises, from a run that stopped half-way.
TEST_F(ReportTest, the_report_of_an_unfinished_run_shows_all_there_is) {
  {
    MetricsWriter w(dir_, 0, R"({"kind":"header","name":"half"})");
    for (int step = 1; step <= 20; ++step) {
      MetricsRecord r = record(5.0 / step);
      r.numbers.insert(r.numbers.end(), {{"grad_norm", 1}, {"learning_rate", 1e-3}, {"max_vio", 1.5}});
      r.lists.emplace_back("expert_load.0", std::vector<double>{1, 2, 3, 2});
      r.lists.emplace_back("quant.0002.experts.down.fprop.act",
                           std::vector<double>{0.0125, 0.25, 0.03125, 0.5, -0.0078125});
      w.write("step", "first", step, step, r);
    }
    MetricsRecord e;
    e.numbers = {{"loss.words", 2.5}, {"loss.sums", 1.5}, {"text_loss", 2.5}};
    e.texts = {{"sample.0", "37+58=<95>"}};
    w.write("eval", "first", 20, 20, e);
    MetricsRecord r;
    r.numbers = {{"reward", 0.5}, {"logprob_equal_fraction", 1}};
    w.write("step", "second", 1, 1001, r);
  }
  write_text_file(dir_ + "/plan.json", kPlan);
  write_report(dir_);
  const std::string html = read("report.html");
  for (const char* part : {"has not finished",
                           "1,840,512, active a token 627,968",
                           "20 of 1,000 steps, 2,048,000 tokens in all",
                           "1 of 7 steps; sampler and trainer do not agree bit for bit: cell &amp; &lt;x&gt;",
                           "loss, nats a token",
                           "held-out words",
                           "held-out sums",
                           "37+58=&lt;95&gt;",
                           "Expert load by layer",
                           "expert load at step 1,",
                           "expert load at step 20,",
                           "experts.down.fprop.act",
                           ">1.25<",
                           ">25<",
                           ">3.1<",
                           ">-0.781<",
                           "reward and accuracy",
                           "first: pretrain.forward, steps 0 to 1,000",
                           "layers 0 to 1",
                           "layer 2",
                           "class=\"nvfp4\">nvfp4 1x16 rne",
                           "tokens were not recorded",
                           "stages[0].pretrain.steps"}) {
    EXPECT_NE(html.find(part), std::string::npos) << part;
  }
}

// Two runs of the same name: a table that is the same in both, one that differs, and a span that one lacks.
TEST_F(ReportTest, runs_beside_each_other_show_what_differs) {
  const auto write_run = [&](const std::string& name, double loss, const std::string& rate) {
    const std::string dir = dir_ + "/" + name;
    MetricsWriter w(dir, 0, R"({"kind":"header","name":"twin"})");
    for (int step = 1; step <= 3; ++step) w.write("step", "first", step, step, record(loss / step));
    write_text_file(dir + "/summary.json",
                    R"({"name":"twin","seed":1,"text_loss_end":)" + std::to_string(loss) + "}");
    std::string plan = kPlan;
    plan.replace(plan.find("\"1000\""), 6, "\"" + rate + "\"");
    if (name == "two") {
      const std::string cell = "nvfp4 1x16 rne";
      plan.replace(plan.find(cell), cell.size(), "bf16 <b>");
    }
    write_text_file(dir + "/plan.json", plan);
  };
  write_run("one", 4, "1000");
  write_run("two", 2, "1000");
  const std::string page = dir_ + "/page.html";
  write_report({dir_ + "/one", dir_ + "/two"}, page);
  std::string html = read("page.html");
  for (const char* part :
       {"A twin (", "B twin (", "/one)", "bf16 &lt;b&gt;", "<td class=\"nvfp4 differs\"><b class=\"ne\"",
        "held-out text loss at the end", "<td>4</td><td>2</td>", "No key differs."}) {
    EXPECT_NE(html.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(html.find("<b>"), html.find("<b>", html.find("<ul class=\"legend\">"))) << "only of ours";
  // The cells that are equal are not marked.
  EXPECT_EQ(html.find("mxfp8 differs"), std::string::npos);
  EXPECT_FALSE(fs::exists(dir_ + "/one/report.html"));

  write_run("two", 2, "2000");
  write_report({dir_ + "/one", dir_ + "/two"}, page);
  html = read("page.html");
  EXPECT_NE(html.find("stages[0].pretrain.steps</th><td>1000</td><td>2000</td>"), std::string::npos);
  EXPECT_EQ(html.find("run.name</th>"), std::string::npos) << "it is equal";
  fs::remove(dir_ + "/two/plan.json");
  write_report({dir_ + "/one", dir_ + "/two"}, page);
  EXPECT_NE(read("page.html").find("is not in its plan.json"), std::string::npos);
  EXPECT_THROW(write_report({dir_ + "/one", dir_ + "/three"}, page), MissingInputError);
}

TEST_F(ReportTest, a_long_curve_is_thinned_and_keeps_its_extremes) {
  Series s;
  s.name = "loss";
  for (int i = 0; i < 100000; ++i) s.points.emplace_back(i, 1.0);
  s.points[54321].second = 9;  // one step of a hundred thousand
  s.points[777].second = -3;
  s.points[888].second = NAN;
  const std::string svg = line_chart("t", "step", {s});
  EXPECT_LT(svg.size(), 40000u);
  EXPECT_NE(svg.find("class=\"band\""), std::string::npos);
  // The band touches the top and the bottom of the plot, which are the extremes.
  EXPECT_NE(svg.find("loss: from -3 to 9, last 1."), std::string::npos) << svg.substr(0, 600);
  EXPECT_NE(svg.find(" 10L"), std::string::npos);
  EXPECT_NE(chart_legend({s}).find("1 not finite"), std::string::npos);
  // Few points are drawn as they are.
  s.points.resize(kMostPoints);
  EXPECT_EQ(line_chart("t", "step", {s}).find("band"), std::string::npos);
}

TEST_F(ReportTest, texts_are_escaped_whatever_bytes_they_hold) {
  EXPECT_EQ(html_escape("<a href='x'>\"&"), "&lt;a href=&#39;x&#39;&gt;&quot;&amp;");
  EXPECT_EQ(html_escape("\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80\n"),
            "\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80\n");
  // A lone lead byte, an overlong '<', a surrogate, a code point past the last, a cut sequence.
  const std::string bad = "\xEF\xBF\xBD";
  EXPECT_EQ(html_escape("\xC3<"), bad + "&lt;");
  EXPECT_EQ(html_escape("\xC0\xBC"), bad + bad);
  EXPECT_EQ(html_escape("\xED\xA0\x80"), bad + bad + bad);
  EXPECT_EQ(html_escape("\xF4\x90\x80\x80"), bad + bad + bad + bad);
  EXPECT_EQ(html_escape("\xE2\x82"), bad + bad);
  EXPECT_EQ(html_escape(std::string("\0\x1b[31m\x7f", 7)), "&#9216;&#9243;[31m&#9249;");
  EXPECT_EQ(html_escape("\xE2\x80\xAE"), "[U+202E]");
}

TEST_F(ReportTest, hostile_lines_are_drawn_or_passed_over) {
  fs::create_directories(dir_);
  write_text_file(dir_ + "/metrics.jsonl",
                  R"({"kind":"header","name":5}
{"kind":"step","stage":"<i>","step":1e308,"loss":1e308,"expert_load.0":["x",null,[1]],"expert_load.1":[]}
{"kind":"step","stage":"<i>","step":-1e308,"loss":-1e308,"quant.99999999999999999999.a.fprop.act":[1]}
{"kind":"step","stage":"<i>","step":2,"loss":1,"quant.0000.\u003cb\u003e.fprop.act":[0.5,"nan",{},[],1e308]}
{"kind":"step","stage":"<i>","step":3,"loss":{"a":1},"reward":[1],"\u003cimg onerror=x\u003e":2}
{"kind":"eval","stage":"<i>","step":4,"sample.0":"\u0000\u001b<img src=x onerror=alert(1)>","tokens":"many"}
{"kind":"other"}
)");
  fs::create_directories(dir_ + "/rollouts/stage-0-step-9.jsonl");  // no file
  write_text_file(
      dir_ + "/rollouts/stage-0-step-4.jsonl",
      R"j({"stage":"<i>","reward":0.5,"prompt":"\u202e<p>","completion":"<script>x</script>","verdict":5}
{"stage":"<i>","reward":"nan","completion":7}
{"stage":
[]
)j");
  write_text_file(
      dir_ + "/times.jsonl",
      "[]\n{\"line\":-1}\n{\"line\":1e30,\"seconds\":1}\n{\"line\":2,\"seconds\":\"x\"}\n{\"line\":");
  write_report(dir_);
  const std::string html = read("report.html");
  for (const char* tag : {"<i>", "<img", "<b>.fprop"}) EXPECT_EQ(html.find(tag), std::string::npos) << tag;
  for (const char* part :
       {"[U+202E]&lt;p&gt;", "&lt;script&gt;x&lt;/script&gt;", "2 lines of rollouts are damaged", "&lt;i&gt;",
        "&lt;img src=x onerror=alert(1)&gt;", "&lt;b&gt;.fprop.act", ">50<"}) {
    EXPECT_NE(html.find(part), std::string::npos) << part;
  }
}

}  // namespace
}  // namespace fp4t
