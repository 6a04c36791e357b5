#include "engine/metrics/svg.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>

namespace fp4t {

namespace {

constexpr double kWidth = 420, kHeight = 220, kLeft = 52, kRight = 12, kTop = 10, kBottom = 38;
constexpr int kStyles = 8;  // colours of the page; dashes and markers have other periods
constexpr int kDashes = 5, kMarkers = 4;

std::string text_of(const char* format, double value) {
  char text[40];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

// A coordinate, to 0.01, without zeros that say nothing.
std::string xy(double value) {
  std::string text = text_of("%.2f", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

// 12000 as "12k": ticks of steps and tokens.
std::string short_count(double v) {
  static constexpr std::pair<double, const char*> kUnits[] = {
      {1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}};
  if (std::abs(v) >= 1e4 && std::abs(v) < 1e15) {
    for (const auto& [unit, name] : kUnits) {
      if (std::abs(v) >= unit) return text_of("%.4g", v / unit) + name;
    }
  }
  return text_of("%.6g", v);
}

// Steps of 1, 2 or 5 times a power of ten, about `count` of them.
double tick_step(double range, int count) {
  const double raw = range / count, power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
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
  bool empty() const { return !(low <= high); }
  // Room around a single value, as much as its digits can show.
  void widen() {
    if (high - low > 1e-12 * std::max(std::abs(low), std::abs(high))) return;
    const double pad = std::max(1e-9, std::abs(low) * 0.05);
    low -= pad;
    high += pad;
  }
  double place(double v, double from, double to) const {
    return from + (v - low) / (high - low) * (to - from);
  }
  std::vector<double> ticks(int count) const {
    const double step = tick_step(high - low, count), first = std::ceil(low / step);
    std::vector<double> list;
    for (int i = 0; i <= 2 * count; ++i) {
      const double v = (first + i) * step;
      if (v > high + 1e-9 * (high - low)) break;
      list.push_back(std::abs(v) < step * 1e-6 ? 0.0 : v);
    }
    return list;
  }
};

double x_at(const Range& x, double v) { return x.place(v, kLeft, kWidth - kRight); }
double y_at(const Range& y, double v) { return y.place(v, kHeight - kBottom, kTop); }

std::string label(double x, double y, const char* anchor, const std::string& text) {
  return "<text x=\"" + xy(x) + "\" y=\"" + xy(y) + "\" text-anchor=\"" + anchor + "\">" + html_escape(text) +
         "</text>";
}

std::string grid(const Range& x, const Range& y, const std::string& x_label) {
  std::string lines, texts;
  for (const double v : y.ticks(5)) {
    lines += "M" + xy(kLeft) + " " + xy(y_at(y, v)) + "H" + xy(kWidth - kRight);
    texts += label(kLeft - 5, y_at(y, v) + 4, "end", text_of("%.4g", v));
  }
  for (const double v : x.ticks(4)) {
    lines += "M" + xy(x_at(x, v)) + " " + xy(kHeight - kBottom) + "v4";
    texts += label(x_at(x, v), kHeight - kBottom + 17, "middle", short_count(v));
  }
  texts += label((kLeft + kWidth - kRight) / 2, kHeight - 5, "middle", x_label);
  return "<path class=\"grid\" d=\"" + lines + "\"/><g class=\"ticks\" aria-hidden=\"true\">" + texts +
         "</g>";
}

// Points of a long series: the mean of every part, and its extremes.
struct Part {
  double x = 0, y = 0, low = 0, high = 0;
};

std::vector<Part> parts_of(const Series& s) {
  const size_t n = s.points.size(), count = std::min(n, kMostPoints);
  std::vector<Part> parts;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = n * i / count, end = n * (i + 1) / count;
    Part p{0, 0, INFINITY, -INFINITY};
    double finite = 0;
    for (size_t k = begin; k < end; ++k) {
      const auto& [px, py] = s.points[k];
      p.x += px / static_cast<double>(end - begin);
      if (!std::isfinite(py)) continue;
      finite += 1;
      p.y += py;
      p.low = std::min(p.low, py);
      p.high = std::max(p.high, py);
    }
    p.y = finite > 0 ? p.y / finite : std::nan("");
    parts.push_back(p);
  }
  return parts;
}

std::string marker(double x, double y, int shape) {
  const std::string at = "M" + xy(x) + " " + xy(y);
  switch (shape) {
    case 0:
      return at + "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z";
    case 1:
      return at + "m-3-3h6v6h-6z";
    case 2:
      return at + "m0-4l4 7h-8z";
    default:
      return at + "m0-4l4 4l-4 4l-4-4z";
  }
}

int style_of(const Series& s, size_t place) { return s.style >= 0 ? s.style : static_cast<int>(place); }

std::string style_classes(int style) {
  return "s" + std::to_string(style % kStyles) + " d" + std::to_string(style % kDashes);
}

std::string draw_series(const Series& s, int style, const Range& x, const Range& y) {
  std::string line, markers, upper, lower, bands;
  const auto close_band = [&] {
    if (!upper.empty()) bands += "M" + upper.substr(1) + lower + "z";
    upper.clear();
    lower.clear();
  };
  const bool thinned = s.points.size() > kMostPoints;
  bool open = false;
  for (const Part& p : parts_of(s)) {
    if (!std::isfinite(p.y)) {
      open = false;
      close_band();
      continue;
    }
    const std::string ax = xy(x_at(x, p.x)), at = ax + " " + xy(y_at(y, p.y));
    line += (open ? "L" : "M") + at;
    open = true;
    if (s.dots) markers += marker(x_at(x, p.x), y_at(y, p.y), style % kMarkers);
    if (!thinned) continue;
    upper += "L" + ax + " " + xy(y_at(y, p.high));
    lower.insert(0, "L" + ax + " " + xy(y_at(y, p.low)));
  }
  close_band();
  std::string out = "<g class=\"" + style_classes(style) + "\">";
  if (!bands.empty()) out += "<path class=\"band\" d=\"" + bands + "\"/>";
  out += "<path class=\"line\" data-name=\"" + html_escape(s.name) + "\" d=\"" + line + "\"/>";
  if (!markers.empty()) out += "<path class=\"mark\" d=\"" + markers + "\"/>";
  return out + "</g>";
}

double last_finite(const Series& s) {
  for (auto it = s.points.rbegin(); it != s.points.rend(); ++it) {
    if (std::isfinite(it->second)) return it->second;
  }
  return std::nan("");
}

std::string description(const std::vector<Series>& series, const std::string& x_label, const Range& x) {
  std::string text = x_label + " from " + text_of("%.6g", x.low) + " to " + text_of("%.6g", x.high) + ".";
  for (const Series& s : series) {
    Range y;
    for (const auto& point : s.points) {
      if (std::isfinite(point.second)) y.add(point.second);
    }
    if (y.empty()) continue;
    text += " " + s.name + ": from " + text_of("%.4g", y.low) + " to " + text_of("%.4g", y.high) + ", last " +
            text_of("%.4g", last_finite(s)) + ".";
  }
  return text;
}

// Length of the well-formed UTF-8 sequence at text[at] (RFC 3629), 0 when there is none; its code point.
size_t utf8_at(const std::string& text, size_t at, uint32_t& code) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : 0u; };
  const uint32_t first = byte(at);
  const size_t length = first < 0x80   ? 1
                        : first < 0xC2 ? 0
                        : first < 0xE0 ? 2
                        : first < 0xF0 ? 3
                        : first < 0xF5 ? 4
                                       : 0;
  if (length == 0) return 0;
  code = length == 1 ? first : first & (0x7Fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0u) != 0x80u) return 0;
    code = code << 6 | (byte(at + i) & 0x3Fu);
  }
  const uint32_t least = length == 3 ? 0x800 : length == 4 ? 0x10000 : 0;
  if (code < least || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return 0;
  return length;
}

std::string escaped_character(uint32_t code) {
  switch (code) {
    case '&':
      return "&amp;";
    case '<':
      return "&lt;";
    case '>':
      return "&gt;";
    case '"':
      return "&quot;";
    case '\'':
      return "&#39;";
    default:
      break;
  }
  // Control pictures U+2400 to U+241F, U+2421 for DEL.
  if (code < 32 && code != '\n' && code != '\t') return "&#" + std::to_string(0x2400 + code) + ";";
  if (code == 127) return "&#9249;";
  const bool turns = code == 0x200E || code == 0x200F || code == 0x61C ||
                     (code >= 0x202A && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
  const bool control = code >= 0x80 && code < 0xA0;
  if (turns || control || (code & 0xFFFEu) == 0xFFFEu || (code >= 0xFDD0 && code <= 0xFDEF)) {
    char name[16];
    std::snprintf(name, sizeof(name), "[U+%04X]", code);
    return name;
  }
  return "";
}

std::string heat_cell(const HeatMap& map, double v) {
  if (!std::isfinite(v)) return "<td class=\"none\"></td>";
  const double share = std::min(1.0, std::abs(v) / std::max(map.high, 1e-300));
  return "<td" + std::string(v < 0 ? " class=\"neg\"" : "") + " style=\"--v:" + text_of("%.2f", share) +
         "\">" + text_of(map.format, v) + "</td>";
}

}  // namespace

std::string html_escape(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    uint32_t code = 0;
    const size_t length = utf8_at(text, at, code);
    if (length == 0) {
      out += "\xEF\xBF\xBD";
      at += 1;
      continue;
    }
    const std::string safe = escaped_character(code);
    out += safe.empty() ? text.substr(at, length) : safe;
    at += length;
  }
  return out;
}

std::string line_chart(const std::string& title, const std::string& x_label,
                       const std::vector<Series>& series, const std::string& css_class) {
  Range x, y;
  for (const Series& s : series) {
    for (const auto& [px, py] : s.points) {
      if (!std::isfinite(px) || !std::isfinite(py)) continue;
      x.add(px);
      y.add(py);
    }
  }
  if (x.empty()) return "";
  x.widen();
  y.widen();
  // Where the page's script finds values: extents of the axes in their units and in the drawing's.
  char extents[200];
  std::snprintf(extents, sizeof(extents), "%.9g %.9g %g %g %.9g %.9g %g %g", x.low, x.high, kLeft,
                kWidth - kRight, y.low, y.high, kHeight - kBottom, kTop);
  std::string out = "<svg class=\"chart " + css_class + "\" viewBox=\"0 0 " + xy(kWidth) + " " + xy(kHeight) +
                    "\" role=\"img\" tabindex=\"0\" data-extents=\"" + extents + "\" data-x=\"" +
                    html_escape(x_label) + "\"><title>" + html_escape(title) + "</title><desc>" +
                    html_escape(description(series, x_label, x)) + "</desc>" + grid(x, y, x_label);
  for (size_t i = 0; i < series.size(); ++i) {
    Series drawn = series[i];
    std::erase_if(drawn.points, [](const auto& p) { return !std::isfinite(p.first); });
    if (!drawn.points.empty()) out += draw_series(drawn, style_of(drawn, i), x, y);
  }
  return out + "</svg>";
}

std::string chart_legend(const std::vector<Series>& series) {
  std::string out;
  for (size_t i = 0; i < series.size(); ++i) {
    const Series& s = series[i];
    const int style = style_of(s, i);
    const auto odd = std::count_if(s.points.begin(), s.points.end(),
                                   [](const auto& p) { return !std::isfinite(p.second); });
    out += "<li class=\"" + style_classes(style) +
           "\"><svg viewBox=\"0 0 30 12\" aria-hidden=\"true\"><path class=\"line\" d=\"M1 6H29\"/>" +
           (s.dots ? "<path class=\"mark\" d=\"" + marker(15, 6, style % kMarkers) + "\"/>" : "") +
           "</svg><span>" + html_escape(s.name) + "</span> <b>" + text_of("%.4g", last_finite(s)) + "</b>" +
           (odd > 0 ? " <em>" + std::to_string(odd) + " not finite</em>" : "") + "</li>";
  }
  return "<ul class=\"legend\">" + out + "</ul>";
}

std::string heat_map(const HeatMap& map) {
  if (map.rows.empty() || map.columns.empty()) return "";
  std::string head = "<th class=\"corner\">" + html_escape(map.corner) + "</th>", body;
  for (const std::string& name : map.columns) head += "<th scope=\"col\">" + html_escape(name) + "</th>";
  for (size_t r = 0; r < map.rows.size(); ++r) {
    body += "<tr><th scope=\"row\">" + html_escape(map.rows[r]) + "</th>";
    for (size_t c = 0; c < map.columns.size(); ++c) {
      body += heat_cell(map, c < map.values[r].size() ? map.values[r][c] : std::nan(""));
    }
    body += "</tr>";
  }
  const std::string title = html_escape(map.title);
  return "<figure class=\"heat\"><figcaption>" + title +
         "</figcaption><div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"" + title +
         "\"><table><thead><tr>" + head + "</tr></thead><tbody>" + body + "</tbody></table></div></figure>";
}

}  // namespace fp4t
