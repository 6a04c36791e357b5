#include "engine/metrics/svg.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace fp4t {

namespace {

constexpr double kWidth = 640, kHeight = 280, kLeft = 62, kRight = 150, kTop = 34, kBottom = 42;
constexpr const char* kColours[] = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd",
                                    "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f"};

std::string text_of(const char* format, double value) {
  char text[40];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

std::string xy(double value) { return text_of("%.1f", value); }

// Steps of 1, 2 or 5 times a power of ten, about `count` of them.
double tick_step(double range, int count) {
  const double raw = range / count, power = std::pow(10.0, std::floor(std::log10(raw)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (raw <= factor * power) return factor * power;
  }
  return 10 * power;
}

struct Range {
  double low = INFINITY, high = -INFINITY;
  void add(double v) {
    low = std::min(low, v);
    high = std::max(high, v);
  }
  void widen() {
    if (high > low) return;
    const double pad = std::max(1e-9, std::abs(low) * 0.05);
    low -= pad;
    high += pad;
  }
  double place(double v, double from, double to) const {
    return from + (v - low) / (high - low) * (to - from);
  }
};

std::string label(double x, double y, const std::string& anchor, const std::string& text,
                  const char* more = "") {
  return "<text x=\"" + xy(x) + "\" y=\"" + xy(y) + "\" text-anchor=\"" + anchor + "\"" + more + ">" +
         html_escape(text) + "</text>";
}

std::string grid(const Range& x, const Range& y) {
  std::string out;
  const double y_step = tick_step(y.high - y.low, 5), x_step = tick_step(x.high - x.low, 6);
  for (double v = std::ceil(y.low / y_step) * y_step; v <= y.high * (1 + 1e-12); v += y_step) {
    const double at = y.place(v, kHeight - kBottom, kTop);
    out += "<line class=\"g\" x1=\"" + xy(kLeft) + "\" x2=\"" + xy(kWidth - kRight) + "\" y1=\"" + xy(at) +
           "\" y2=\"" + xy(at) + "\"/>";
    out += label(kLeft - 6, at + 4, "end", text_of("%.4g", std::abs(v) < y_step * 1e-6 ? 0.0 : v));
  }
  for (double v = std::ceil(x.low / x_step) * x_step; v <= x.high * (1 + 1e-12); v += x_step) {
    const double at = x.place(v, kLeft, kWidth - kRight);
    out += label(at, kHeight - kBottom + 16, "middle", text_of("%.6g", v));
  }
  return out;
}

std::string draw_series(const Series& s, const Range& x, const Range& y, const char* colour) {
  std::string out, line;
  auto flush = [&] {
    if (!line.empty())
      out += "<polyline fill=\"none\" stroke=\"" + std::string(colour) + "\" stroke-width=\"1.5\" points=\"" +
             line + "\"/>";
    line.clear();
  };
  for (const auto& [px, py] : s.points) {
    if (!std::isfinite(py)) {
      flush();
      continue;
    }
    const double ax = x.place(px, kLeft, kWidth - kRight), ay = y.place(py, kHeight - kBottom, kTop);
    line += xy(ax) + "," + xy(ay) + " ";
    if (s.dots)
      out += "<circle cx=\"" + xy(ax) + "\" cy=\"" + xy(ay) + "\" r=\"3\" fill=\"" + colour + "\"/>";
  }
  flush();
  return out;
}

}  // namespace

std::string html_escape(const std::string& text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        // Control characters have no place in a document.
        out += static_cast<unsigned char>(c) < 32 && c != '\n' ? ' ' : c;
    }
  }
  return out;
}

std::string line_chart(const std::string& title, const std::string& x_label,
                       const std::vector<Series>& series) {
  Range x, y;
  for (const Series& s : series) {
    for (const auto& [px, py] : s.points) {
      if (!std::isfinite(py)) continue;
      x.add(px);
      y.add(py);
    }
  }
  if (!(x.low <= x.high)) return "";
  x.widen();
  y.widen();
  std::string out = "<svg viewBox=\"0 0 " + xy(kWidth) + " " + xy(kHeight) + "\" role=\"img\">";
  out += label(kLeft, 20, "start", title, " class=\"t\"") + grid(x, y);
  out += label((kLeft + kWidth - kRight) / 2, kHeight - 8, "middle", x_label);
  for (size_t i = 0; i < series.size(); ++i) {
    const char* colour = kColours[i % std::size(kColours)];
    out += draw_series(series[i], x, y, colour);
    const double at = kTop + 14 + 17 * static_cast<double>(i);
    out += "<rect x=\"" + xy(kWidth - kRight + 12) + "\" y=\"" + xy(at - 9) +
           "\" width=\"10\" height=\"10\" fill=\"" + colour + "\"/>";
    out += label(kWidth - kRight + 27, at, "start", series[i].name);
  }
  return out + "</svg>";
}

std::string heat_map(const HeatMap& map) {
  if (map.rows.empty() || map.columns.empty()) return "";
  constexpr double kCellWidth = 56, kCellHeight = 22, kLetter = 6.2;  // of 11px type
  const auto longest = [](const std::vector<std::string>& names) {
    size_t most = 0;
    for (const std::string& name : names) most = std::max(most, name.size());
    return kLetter * static_cast<double>(most);
  };
  const double side = longest(map.rows) + 14;
  const double head = 40 + 0.45 * longest(map.columns);  // names rise by 25 degrees
  const double width = std::max(side + kCellWidth * static_cast<double>(map.columns.size()) + 40,
                                kLetter * 1.25 * static_cast<double>(map.title.size()));
  const double height = head + kCellHeight * static_cast<double>(map.rows.size()) + 10;
  std::string out = "<svg viewBox=\"0 0 " + xy(width) + " " + xy(height) +
                    "\" style=\"max-width:" + xy(width) + "px\" role=\"img\">";
  out += label(4, 18, "start", map.title, " class=\"t\"");
  for (size_t c = 0; c < map.columns.size(); ++c) {
    const double at = side + kCellWidth * (static_cast<double>(c) + 0.5);
    out += "<text transform=\"translate(" + xy(at - 10) + "," + xy(head - 6) + ") rotate(-25)\">" +
           html_escape(map.columns[c]) + "</text>";
  }
  for (size_t r = 0; r < map.rows.size(); ++r) {
    const double top = head + kCellHeight * static_cast<double>(r);
    out += label(side - 8, top + 15, "end", map.rows[r]);
    for (size_t c = 0; c < map.columns.size(); ++c) {
      const double v = map.values[r][c];
      const double left = side + kCellWidth * static_cast<double>(c);
      if (!std::isfinite(v)) continue;
      const double share = std::clamp((v - map.low) / std::max(map.high - map.low, 1e-300), 0.0, 1.0);
      out += "<rect x=\"" + xy(left) + "\" y=\"" + xy(top) + "\" width=\"" + xy(kCellWidth - 2) +
             "\" height=\"" + xy(kCellHeight - 2) + "\" fill=\"#2166ac\" fill-opacity=\"" +
             text_of("%.3f", 0.06 + 0.74 * share) + "\"/>";
      out += label(left + kCellWidth / 2 - 1, top + 15, "middle", text_of(map.format, v));
    }
  }
  return out + "</svg>";
}

}  // namespace fp4t
