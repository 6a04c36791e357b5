// The report in a real browser, where Chromium is installed: every chart is drawn, on a laptop and on a
// phone, for one run and for two; skipped elsewhere.
#include <cstdlib>
#include <filesystem>

#include "tests/support/runs.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

std::string chromium() {
  const char* path = std::getenv("PATH");
  std::string folders = path ? path : "";
  for (size_t begin = 0; begin <= folders.size();) {
    const size_t end = std::min(folders.find(':', begin), folders.size());
    for (const char* name : {"chromium", "chromium-browser", "google-chrome"}) {
      const std::string file = folders.substr(begin, end - begin) + "/" + name;
      std::error_code error;
      if (fs::is_regular_file(file, error)) return file;
    }
    begin = end + 1;
  }
  return "";
}

// Runs in the page, measures what the browser made of it and tells the page around it.
const char* const kProbe = R"js(<script>
addEventListener('load', () => {
  const seen = e => e.getBoundingClientRect().width > 0 && e.getBoundingClientRect().height > 0;
  const charts = [...document.querySelectorAll('svg.chart')];
  const drawn = css => charts.filter(c => c.classList.contains(css) && seen(c) && [...c.querySelectorAll('path.line')]
    .some(p => p.getTotalLength() > 0 || c.querySelector('path.mark'))).length;
  const all = css => charts.filter(c => c.classList.contains(css) && !c.closest('details:not([open])')).length;
  for (const d of document.querySelectorAll('details')) d.open = true;
  const r = {};
  for (const [axis, css] of [['step', 'ax-step'], ['tokens', 'ax-tokens'], ['time', 'ax-time']]) {
    document.getElementById('x-' + axis).click();
    r[axis] = {charts: all(css), drawn: drawn(css),
               others: charts.filter(c => !c.classList.contains(css) && seen(c)).length};
  }
  document.getElementById('x-step').click();
  const first = document.querySelector('svg.ax-step');
  for (let i = 0; i < 3; ++i) first.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}));
  r.readout = first.closest('figure').querySelector('.readout').textContent;
  r.heat = [...document.querySelectorAll('.heat td')].filter(td => seen(td) && td.textContent).length;
  r.coloured = new Set([...document.querySelectorAll('.heat td')].map(td => getComputedStyle(td).backgroundColor)).size;
  r.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  r.unnamed = charts.filter(c => !c.querySelector('title').textContent || !c.querySelector('desc').textContent).length;
  r.scripts = document.scripts.length;
  r.marked = document.querySelectorAll('td.differs').length;
  parent.postMessage(JSON.stringify(r), '*');
});
</script></body>)js";

class ReportInChromium : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (chromium().empty()) return;
    folder_ = new ScratchFolder;
    write_inputs(folder_->path(), kTinyRecipe);
    train(folder_->path());
    train(folder_->path(),
          {"--set", "run.dir=other", "--set", "precision.pretrain.forward[1].scale_rule=amax"});
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }
  void SetUp() override {
    if (chromium().empty()) GTEST_SKIP() << "Chromium is not installed";
  }

  // What the probe measured in a window of that width.
  static nlohmann::json look_at(const std::string& page, int width) {
    std::string html = read_text(page);
    const size_t end = html.rfind("</body>");
    EXPECT_NE(end, std::string::npos);
    html.replace(end, 7, kProbe);
    write_text(*folder_ / "probed.html", html);
    write_text(
        *folder_ / "around.html",
        "<!doctype html><body><iframe src=probed.html style=border:0 width=" + std::to_string(width) +
            " height=800></iframe><script>addEventListener('message', e => { document.body.textContent = "
            "'RESULT' + e.data + 'END'; });</script>");
    const Command command{{chromium(), "--headless", "--no-sandbox", "--disable-gpu",
                           "--disable-dev-shm-usage", "--user-data-dir=" + *folder_ / "profile",
                           "--window-size=1400,900", "--virtual-time-budget=20000", "--dump-dom",
                           "file://" + *folder_ / "around.html"}};
    Process process(folder_->path(), command);
    const Exit exit = process.wait();
    const size_t begin = exit.output.find("RESULT{"), stop = exit.output.find("}END");
    EXPECT_TRUE(begin != std::string::npos && stop != std::string::npos) << exit.output << exit.errors;
    if (begin == std::string::npos || stop == std::string::npos) return nlohmann::json::object();
    return nlohmann::json::parse(exit.output.substr(begin + 6, stop + 1 - begin - 6));
  }

  static void expect_drawn(const nlohmann::json& r, int least_charts) {
    for (const char* axis : {"step", "tokens", "time"}) {
      const auto& a = r.at(axis);
      EXPECT_GE(a.at("charts").get<int>(), least_charts) << r;
      EXPECT_EQ(a.at("drawn"), a.at("charts")) << axis << ": " << r;
      EXPECT_EQ(a.at("others"), 0) << axis << ": " << r;
    }
    EXPECT_GT(r.at("heat").get<int>(), 50) << r;
    EXPECT_GT(r.at("coloured").get<int>(), 5) << r;
    EXPECT_EQ(r.at("overflow").get<int>(), 0) << "the page is wider than its window: " << r;
    EXPECT_EQ(r.at("unnamed"), 0) << r;
    EXPECT_EQ(r.at("scripts"), 2) << "the page's own and the probe: " << r;
    EXPECT_EQ(r.at("readout").get<std::string>().rfind("step ", 0), 0u) << r;
  }

  inline static ScratchFolder* folder_ = nullptr;
};

TEST_F(ReportInChromium, every_chart_of_a_run_is_drawn_on_a_laptop_and_on_a_phone) {
  for (const int width : {1280, 360}) expect_drawn(look_at(*folder_ / "run/report.html", width), 20);
}

TEST_F(ReportInChromium, every_chart_of_two_runs_is_drawn_and_differences_are_marked) {
  const Exit exit = run_binary(folder_->path(), {"report", "run", "other", "--out", "both.html"});
  ASSERT_EQ(exit.code, 0) << exit.errors;
  for (const int width : {1280, 360}) {
    const nlohmann::json r = look_at(*folder_ / "both.html", width);
    expect_drawn(r, 30);
    EXPECT_GT(r.at("marked").get<int>(), 0) << r;
  }
}

}  // namespace
}  // namespace fp4t::test
