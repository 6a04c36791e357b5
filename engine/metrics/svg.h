// Charts of the report as text: lines over an x axis as SVG, a heat map as an HTML table. Both stand without
// scripts and external references; colours, dashes and sizes are the page's (report_page.cpp).
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace fp4t {

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x, y; y that is not finite breaks the line
  bool dots = false;                              // markers at the points
  int style = -1;                                 // colour and dashes; -1: by its place in the chart
};

// An SVG of 420 x 220 with axes, grid and a description for who does not see it; "" when no series has a
// finite point. Series of more than kMostPoints are drawn as means over equal numbers of points, in a band
// from the least to the largest of them.
inline constexpr size_t kMostPoints = 400;
std::string line_chart(const std::string& title, const std::string& x_label,
                       const std::vector<Series>& series, const std::string& css_class = "");

// The list under a chart: each series' mark, name and last value, and how many values were not finite.
std::string chart_legend(const std::vector<Series>& series);

struct HeatMap {
  std::string title;
  std::string corner;  // what columns are
  std::vector<std::string> rows, columns;
  std::vector<std::vector<double>> values;  // [rows][columns]; not finite: an empty cell
  double high = 1;                          // magnitude of the deepest colour; negative values have their own
  const char* format = "%.3g";              // of the values in the cells
};
std::string heat_map(const HeatMap& map);

// Text with & < > " ' made safe for HTML and SVG; ill-formed UTF-8 becomes U+FFFD, control characters (but
// for line feeds and tabs) their pictures, and characters that turn the direction of text are named.
std::string html_escape(const std::string& text);

}  // namespace fp4t
