// A folder of its own for each test of metrics and reports.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "engine/metrics/metrics.h"

namespace fp4t {

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = (std::filesystem::temp_directory_path() / ("fp4t_metrics_" + std::to_string(::getpid()))).string();
    std::filesystem::remove_all(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
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

// Not lines of metrics, each as the third of a file.
inline const char* const kDamaged[] = {"3",
                                       "[]",
                                       "",
                                       "{\"kind\":3}",
                                       "{\"kind\":\"step\"}",
                                       "{\"kind\":\"step\",",
                                       "{\"kind\":\"eval\",\"stage\":\"s\",\"step\":\"1\"}"};

}  // namespace fp4t
