// Charts as SVG text: lines over an x axis, and a heat map. No scripts, no external references.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace fp4t {

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x, y; y that is not finite breaks the line
  bool dots = false;                              // markers at the points
};

// A chart of 640 x 280 with axes, grid and legend; "" when no series has a finite point.
std::string line_chart(const std::string& title, const std::string& x_label,
                       const std::vector<Series>& series);

struct HeatMap {
  std::string title;
  std::vector<std::string> rows, columns;
  std::vector<std::vector<double>> values;  // [rows][columns]
  double low = 0, high = 1;                 // colours: white to deep
  const char* format = "%.3g";              // of the values in the cells
};
std::string heat_map(const HeatMap& map);

// Text with & < > " made safe for HTML and SVG.
std::string html_escape(const std::string& text);

}  // namespace fp4t
