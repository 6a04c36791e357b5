#include "engine/metrics/metrics.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "engine/metrics/svg.h"
#include "engine/metrics/tensorboard.h"
#include "kernels/base/check.h"

namespace fp4t {
namespace {

namespace fs = std::filesystem;

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = (fs::temp_directory_path() / ("fp4t_metrics_" + std::to_string(::getpid()))).string();
    fs::remove_all(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }
  std::string read(const std::string& name) {
    std::ifstream in(dir_ + "/" + name, std::ios::binary);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }
  static MetricsRecord record(double loss) {
    MetricsRecord r;
    r.numbers = {{"loss", loss}};
    return r;
  }
  std::string dir_;
};

TEST_F(MetricsTest, a_resumed_file_loses_what_lies_past_the_checkpoint) {
  {
    MetricsWriter w(dir_, 0, R"({"kind":"header"})");
    for (int i = 1; i <= 5; ++i) w.write("step", "pretrain", i, i, record(i));
    EXPECT_EQ(w.lines(), 6);
  }
  const std::string whole = read("metrics.jsonl");
  std::ofstream(dir_ + "/metrics.jsonl", std::ios::app) << R"({"kind":"st)";  // a torn line
  {
    MetricsWriter w(dir_, 4, R"({"kind":"header"})");
    for (int i = 4; i <= 5; ++i) w.write("step", "pretrain", i, i, record(i));
  }
  EXPECT_EQ(read("metrics.jsonl"), whole);
}

// Not lines of metrics, each as the third of a file.
const char* const kDamaged[] = {"3",
                                "[]",
                                "",
                                "{\"kind\":3}",
                                "{\"kind\":\"step\"}",
                                "{\"kind\":\"step\",",
                                "{\"kind\":\"eval\",\"stage\":\"s\",\"step\":\"1\"}"};

TEST_F(MetricsTest, a_damaged_line_is_told_when_a_run_goes_on_and_nothing_is_cut) {
  for (const char* damaged : kDamaged) {
    fs::remove_all(dir_);
    { MetricsWriter(dir_, 0, R"({"kind":"header"})").write("step", "s", 1, 1, record(1)); }
    std::ofstream(dir_ + "/metrics.jsonl", std::ios::app) << damaged << "\n"
                                                          << R"({"kind":"end"})"
                                                          << "\n";
    const std::string before = read("metrics.jsonl");
    try {
      MetricsWriter(dir_, 3, R"({"kind":"header"})");
      ADD_FAILURE() << damaged << " was accepted";
    } catch (const BadDataError& e) {
      const std::string text = e.what();
      EXPECT_NE(text.find("metrics.jsonl:3: "), std::string::npos) << text;
      EXPECT_EQ(text.find("line 1"), std::string::npos) << text;
    }
    EXPECT_EQ(read("metrics.jsonl"), before);
    // Behind what is kept it does no harm.
    EXPECT_EQ(MetricsWriter(dir_, 2, R"({"kind":"header"})").lines(), 2);
  }
}

TEST_F(MetricsTest, a_report_of_damaged_files_names_file_and_line) {
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

TEST_F(MetricsTest, a_full_disk_shows_in_the_tensorboard_file) {
  rlimit unlimited{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  const auto write_with_room_for = [&](rlim_t bytes) {
    const rlimit limit{bytes, unlimited.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    std::string refusal;
    try {
      TensorBoardFile file(dir_ + "/tb");
      file.write(1, 2, {{"loss", 1.0}});
    } catch (const SaveError& e) {
      refusal = e.what();
    }
    ::setrlimit(RLIMIT_FSIZE, &unlimited);
    EXPECT_NE(refusal.find("tfevents"), std::string::npos) << "room for " << bytes;
    EXPECT_NE(refusal.find("too large"), std::string::npos) << refusal;
  };
  write_with_room_for(10);  // not even the first record
  write_with_room_for(50);
  std::signal(SIGXFSZ, before);
}

TEST_F(MetricsTest, numbers_round_trip_and_non_finite_ones_are_named) {
  MetricsWriter w(dir_, 0, R"({"kind":"header"})");
  MetricsRecord r = record(0.1 + 0.2);
  r.numbers.emplace_back("bad", std::nan(""));
  r.numbers.emplace_back("large", -INFINITY);
  r.texts.emplace_back("text", "\xff\"quoted\"");
  r.lists.emplace_back("list", std::vector<double>{1, 2.5});
  w.write("step", "s", 1, 1, r);
  std::istringstream lines(read("metrics.jsonl"));
  std::string line;
  std::getline(lines, line);
  std::getline(lines, line);
  const auto j = nlohmann::json::parse(line);
  EXPECT_EQ(j["loss"].get<double>(), 0.1 + 0.2);
  EXPECT_EQ(j["bad"], "nan");
  EXPECT_EQ(j["large"], "-inf");
  EXPECT_EQ(j["list"][1], 2.5);
}

TEST_F(MetricsTest, tensorboard_records_have_valid_frames) {
  EXPECT_EQ(crc32c("123456789", 9), 0xE3069283u);  // the check value of CRC-32C
  {
    TensorBoardFile f(dir_ + "/tb");
    f.write(7, 1.5, {{"pretrain/loss", 2.25}});
  }
  std::string data;
  for (const auto& entry : fs::directory_iterator(dir_ + "/tb"))
    data = read("tb/" + entry.path().filename().string());
  int records = 0;
  std::string last;
  for (size_t at = 0; at < data.size(); ++records) {
    uint64_t length;
    uint32_t crc;
    std::memcpy(&length, data.data() + at, 8);
    std::memcpy(&crc, data.data() + at + 8, 4);
    ASSERT_EQ(crc, masked_crc32c(data.data() + at, 8));
    last = data.substr(at + 12, length);
    std::memcpy(&crc, data.data() + at + 12 + length, 4);
    ASSERT_EQ(crc, masked_crc32c(last.data(), length));
    at += 16 + length;
  }
  EXPECT_EQ(records, 2);
  EXPECT_NE(data.find("brain.Event:2"), std::string::npos);
  EXPECT_NE(last.find("pretrain/loss"), std::string::npos);
  const float value = 2.25f;
  EXPECT_NE(last.find(std::string(reinterpret_cast<const char*>(&value), 4)), std::string::npos);
}

TEST_F(MetricsTest, charts_and_report_survive_any_values) {
  EXPECT_EQ(line_chart("t", "x", {{"a", {{1, NAN}}, false}}), "");
  const std::string svg = line_chart("a<b", "x", {{"s", {{1, 5}, {2, INFINITY}, {3, 5}}, true}});
  EXPECT_NE(svg.find("a&lt;b"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  EXPECT_THROW(write_report(dir_), MissingInputError);
  {
    MetricsWriter w(dir_, 0, R"({"kind":"header","name":"<script>"})");
    MetricsRecord r = record(3);
    r.lists.emplace_back("expert_load.0", std::vector<double>{0, 0});
    w.write("step", "pretrain", 1, 1, r);
    w.write("step", "pretrain", 2, 2, record(NAN));
  }
  write_report(dir_);
  const std::string html = read("report.html");
  EXPECT_EQ(html.find("<script>"), std::string::npos);
  EXPECT_EQ(html.find("http"), std::string::npos);  // self-contained
  EXPECT_NE(html.find("<svg"), std::string::npos);
  // A process that was killed tears its last line; the report shows the others.
  std::ofstream(dir_ + "/metrics.jsonl", std::ios::app) << R"({"kind":"st)";
  write_report(dir_);
  EXPECT_EQ(read("report.html"), html);
  std::ofstream(dir_ + "/metrics.jsonl", std::ios::app) << "\n";
  EXPECT_THROW(write_report(dir_), BadDataError);
}

const char* const kPlan = R"({
 "device": "cpu",
 "model": {"layers": 3, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "vocabulary": 257, "experts": 4,
           "expert_hidden": 32, "top_k": 2},
 "parameters": {"total": 1840512, "active": 627968},
 "stages": [{"name": "first", "kind": "pretrain", "steps": 1000, "tokens": 2048000, "precision": [
   {"table": "pretrain.forward", "begin": 0, "end": 1000, "cells": [
     {"layer": 0, "module": "attn.qkv", "gemm": "fprop", "operand": "act", "format": "mxfp8", "cell": "mxfp8"},
     {"layer": 1, "module": "attn.qkv", "gemm": "fprop", "operand": "act", "format": "mxfp8", "cell": "mxfp8"},
     {"layer": 2, "module": "attn.qkv", "gemm": "fprop", "operand": "act", "format": "nvfp4", "cell": "nvfp4 1x16 rne"},
     {"layer": null, "module": "embed", "format": "bf16", "cell": "bf16"}]}]},
  {"name": "second", "kind": "rl", "steps": 7, "equal_bits": false, "equality_obstacle": "cell & <x>", "precision": []}]})";

// Everything that the report promises, from a run that stopped half-way.
TEST_F(MetricsTest, the_report_of_an_unfinished_run_shows_all_there_is) {
  {
    MetricsWriter w(dir_, 0, R"({"kind":"header","name":"half"})");
    for (int step = 1; step <= 20; ++step) {
      MetricsRecord r = record(5.0 / step);
      r.numbers.insert(r.numbers.end(), {{"grad_norm", 1}, {"learning_rate", 1e-3}, {"max_vio", 1.5}});
      r.lists.emplace_back("expert_load.0", std::vector<double>{1, 2, 3, 2});
      r.lists.emplace_back("quant.0002.experts.down.fprop.act",
                           std::vector<double>{0.0125, 0.25, 0.03125, 0.5});
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
                           "reward and accuracy",
                           "first: pretrain.forward, steps 0 to 1,000",
                           "layers 0 to 1",
                           "layer 2",
                           "class=\"nvfp4\">nvfp4 1x16 rne"}) {
    EXPECT_NE(html.find(part), std::string::npos) << part;
  }
}

TEST_F(MetricsTest, what_stands_in_the_way_of_a_file_is_an_error_of_saving) {
  fs::create_directories(dir_ + "/log.txt");
  EXPECT_THROW(Console{dir_}, SaveError);
  fs::create_directories(dir_ + "/metrics.jsonl");
  EXPECT_THROW(MetricsWriter(dir_, 0, "{}"), SaveError);
  fs::remove_all(dir_);
  fs::create_directories(dir_);
  write_text_file(dir_ + "/tensorboard", "");
  MetricsWriter w(dir_, 0, "{}");
  EXPECT_THROW(w.write("step", "s", 1, 1, record(1)), SaveError);
  EXPECT_THROW(Console{dir_ + "/tensorboard/below"}, SaveError);
}

TEST_F(MetricsTest, a_small_file_is_replaced_whole_or_not_at_all) {
  fs::create_directories(dir_);
  write_text_file(dir_ + "/a", "one");
  write_text_file(dir_ + "/a", "two");
  EXPECT_EQ(read("a"), "two");
  EXPECT_THROW(write_text_file(dir_ + "/none/a", "x"), SaveError);
}

}  // namespace
}  // namespace fp4t
