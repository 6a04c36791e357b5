#include "engine/comm/agree.h"

#include <cstring>
#include <utility>

namespace fp4t {

std::vector<std::string> gather_texts(Communicator& comm, const std::string& mine) {
  const auto ranks = static_cast<size_t>(comm.size());
  const auto own = static_cast<int64_t>(mine.size());
  std::vector<int64_t> sizes(ranks);
  comm.all_gather(&own, sizes.data(), sizeof(own));
  int64_t total = 0;
  for (const int64_t n : sizes) total += n;
  std::string sent;
  for (size_t r = 0; r < ranks; ++r) sent += mine;
  std::string received(static_cast<size_t>(total), '\0');
  comm.all_to_all(sent.data(), std::vector<int64_t>(ranks, own), received.data(), sizes);
  std::vector<std::string> texts;
  size_t at = 0;
  for (const int64_t n : sizes) {
    texts.push_back(received.substr(at, static_cast<size_t>(n)));
    at += static_cast<size_t>(n);
  }
  return texts;
}

std::string broadcast_text(Communicator& comm, const std::string& text, int root) {
  auto size = static_cast<int64_t>(text.size());
  comm.broadcast(&size, sizeof(size), root);
  std::string out = text;
  out.resize(static_cast<size_t>(size));
  comm.broadcast(out.data(), size, root);
  return out;
}

namespace {

// A name, a zero byte, the value's bytes.
std::string packed(const std::map<std::string, double>& values) {
  std::string text;
  for (const auto& [name, value] : values) {
    char bytes[sizeof(double)];
    std::memcpy(bytes, &value, sizeof(value));
    text += name;
    text += '\0';
    text.append(bytes, sizeof(bytes));
  }
  return text;
}

void add_packed(const std::string& text, std::map<std::string, double>& sums) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\0', at);
    FP4T_CHECK(end != std::string::npos && end + sizeof(double) < text.size() + 1, "sums cut off at ", at);
    double value = 0;
    std::memcpy(&value, text.data() + end + 1, sizeof(value));
    sums[text.substr(at, end - at)] += value;
    at = end + 1 + sizeof(double);
  }
}

}  // namespace

std::map<std::string, double> sum_by_name(Communicator& comm, const std::map<std::string, double>& mine) {
  if (comm.size() == 1) return mine;
  std::map<std::string, double> sums;
  for (const std::string& text : gather_texts(comm, packed(mine))) add_packed(text, sums);
  return sums;
}

std::string first_difference(Communicator& comm, const std::map<std::string, std::string>& facts) {
  std::string lines;
  for (const auto& [name, value] : facts) lines += name + '\t' + value + '\n';
  const std::vector<std::string> all = gather_texts(comm, lines);
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    size_t at = 0;
    while (at < all[r].size() && at < all[0].size() && all[r][at] == all[0][at]) ++at;
    const std::string& longer = at < all[0].size() ? all[0] : all[r];
    const size_t line = at == 0 ? 0 : longer.rfind('\n', at - 1) + 1;  // npos + 1 is 0
    return detail::concat("rank ", r, ": ", longer.substr(line, longer.find('\t', line) - line));
  }
  return "";
}

void on_rank_zero(Communicator& comm, const std::function<void()>& body) {
  if (comm.size() == 1) {
    body();
    return;
  }
  int32_t code = 0;
  std::string message;
  if (comm.rank() == 0) {
    try {
      body();
    } catch (const Error& e) {
      code = static_cast<int32_t>(e.code());
      message = e.what();
    }
  }
  comm.broadcast(&code, sizeof(code), 0);
  if (code == 0) return;
  throw Error(static_cast<ExitCode>(code), broadcast_text(comm, message, 0));
}

}  // namespace fp4t
