#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>

#include "engine/metrics/prometheus.h"
#include "engine/metrics/tensorboard.h"
#include "kernels/base/check.h"
#include "tests/unit/metrics_fixture.h"

namespace fp4t {
namespace {

namespace fs = std::filesystem;

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
  for (const auto& entry : fs::directory_iterator(dir_ + "/tensorboard")) {
    const std::string events = read("tensorboard/" + entry.path().filename().string());
    EXPECT_NE(events.find("    \xEF\xBF\xBD\"quoted\""), std::string::npos) << "also there it is UTF-8";
  }
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

// scripts/check_tensorboard.py asks TensorBoard itself.
TEST_F(MetricsTest, tensorboard_gets_texts_as_string_tensors_that_markdown_leaves_alone) {
  {
    TensorBoardFile f(dir_ + "/tb");
    f.write(3, 1.5, {}, {{"s/sample.0", "a\n# b"}});
  }
  std::string data;
  for (const auto& entry : fs::directory_iterator(dir_ + "/tb"))
    data = read("tb/" + entry.path().filename().string());
  const std::string value = std::string("\x0a\x0as/sample.0") +           // tag
                            "\x42\x17\x08\x07\x12\x04\x12\x02\x08\x01" +  // tensor, string, shape [1]
                            "\x42\x0d    a\n    # b" +                    // string_val
                            "\x4a\x0a\x0a\x06\x0a\x04text\x20\x02";       // metadata
  EXPECT_NE(data.find(value), std::string::npos);
}

TEST_F(MetricsTest, prometheus_gets_a_whole_file_of_typed_and_escaped_figures) {
  fs::create_directories(dir_);
  const std::string path = dir_ + "/run.prom";
  PrometheusFile file(path, "a \"b\"\\\n<c>");
  EXPECT_TRUE(fs::exists(path));
  MetricsRecord r = record(1.5);
  r.numbers.insert(r.numbers.end(), {{"tokens", 4096}, {"odd-name", NAN}, {"grad_norm", INFINITY}});
  file.update("step", "first", 7, r, 1700000000);
  MetricsRecord e;
  e.numbers = {{"loss.words", 2.25}, {"loss.sums", 0.5}};
  e.texts = {{"sample.0", "x"}};
  file.update("eval", "first", 7, e, 1700000001);
  const std::string run = R"(run="a \"b\"\\\n<c>")", both = run + ",stage=\"first\"";
  EXPECT_EQ(read("run.prom"),
            "# HELP fp4train_eval_loss 'loss' of the newest eval line of metrics.jsonl.\n"
            "# TYPE fp4train_eval_loss gauge\n"
            "fp4train_eval_loss{" +
                both +
                ",of=\"sums\"} 0.5\n"
                "fp4train_eval_loss{" +
                both +
                ",of=\"words\"} 2.25\n"
                "# HELP fp4train_grad_norm 'grad_norm' of the newest step line of metrics.jsonl.\n"
                "# TYPE fp4train_grad_norm gauge\n"
                "fp4train_grad_norm{" +
                both +
                "} +Inf\n"
                "# HELP fp4train_last_update_timestamp_seconds When this file was written.\n"
                "# TYPE fp4train_last_update_timestamp_seconds gauge\n"
                "fp4train_last_update_timestamp_seconds{" +
                run +
                "} 1700000001\n"
                "# HELP fp4train_loss 'loss' of the newest step line of metrics.jsonl.\n"
                "# TYPE fp4train_loss gauge\n"
                "fp4train_loss{" +
                both +
                "} 1.5\n"
                "# HELP fp4train_odd_name 'odd-name' of the newest step line of metrics.jsonl.\n"
                "# TYPE fp4train_odd_name gauge\n"
                "fp4train_odd_name{" +
                both +
                "} NaN\n"
                "# HELP fp4train_steps_total Finished steps of the stage.\n"
                "# TYPE fp4train_steps_total counter\n"
                "fp4train_steps_total{" +
                both +
                "} 7\n"
                "# HELP fp4train_tokens_total Trained tokens of the run.\n"
                "# TYPE fp4train_tokens_total counter\n"
                "fp4train_tokens_total{" +
                run + "} 4096\n");
  EXPECT_FALSE(fs::exists(path + ".tmp"));
  EXPECT_THROW(PrometheusFile(dir_ + "/none/run.prom", "r"), SaveError);
}

TEST_F(MetricsTest, times_stand_beside_the_metrics_and_go_on_after_a_resume) {
  const auto times = [&] {
    std::vector<std::pair<int, double>> list;
    std::istringstream in(read("times.jsonl"));
    for (std::string line; std::getline(in, line);) {
      const auto j = nlohmann::json::parse(line);
      list.emplace_back(j.at("line").get<int>(), j.at("seconds").get<double>());
    }
    return list;
  };
  {
    MetricsWriter w(dir_, 0, R"({"kind":"header"})");
    for (int i = 1; i <= 3; ++i) w.write("step", "s", i, i, record(1));
  }
  auto first = times();
  ASSERT_EQ(first.size(), 3u);
  EXPECT_EQ(first[0].first, 2);  // the header is line 1
  EXPECT_EQ(first[2].first, 4);
  EXPECT_LE(first[0].second, first[2].second);
  write_text_file(
      dir_ + "/times.jsonl",
      "{\"line\":2,\"seconds\":100}\n{\"line\":3,\"seconds\":2000}\n{\"line\":4,\"seconds\":3000}\n{\"li");
  { MetricsWriter(dir_, 3, R"({"kind":"header"})").write("step", "s", 3, 3, record(1)); }
  first = times();
  ASSERT_EQ(first.size(), 3u);
  EXPECT_EQ(first[1], std::pair(3, 2000.0));
  EXPECT_EQ(first[2].first, 4);
  EXPECT_GE(first[2].second, 2000);
  EXPECT_LT(first[2].second, 3000) << "the step that was done again is counted once";
  write_report(dir_);
  EXPECT_NE(read("report.html").find("data-x=\"minutes\""), std::string::npos);
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
