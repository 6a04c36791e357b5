// What scripts/check_tokenizers.py runs:
//   bench_tokenizer encode TOKENIZER IN OUT   each line of IN is a text in hexadecimal; OUT gets two lines
//   for it, its
//                                             ids, then its ids where texts of special tokens are those
//                                             tokens
//   bench_tokenizer speed TOKENIZER IN        the texts of IN one by one, on one thread: MB a second of
//   processor time,
//                                             in the quickest of five rounds
// TOKENIZER is a tokenizer.json, or a SentencePiece .model.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "engine/tokens/tokenizer.h"
#include "kernels/base/text_file.h"

namespace {

using fp4t::Tokenizer;

std::vector<std::string> lines_of(const std::string& path) {
  std::istringstream in(fp4t::read_text_file(path));
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string from_hex(const std::string& hex) {
  std::string text;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    text += static_cast<char>(static_cast<uint8_t>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  }
  return text;
}

void write_ids(std::ofstream& out, const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) out << id << ' ';
  out << '\n';
}

int encode(const Tokenizer& tokenizer, const std::string& in, const std::string& out_path) {
  std::ofstream out(out_path);
  int lossy = 0;
  for (const std::string& hex : lines_of(in)) {
    const std::string text = from_hex(hex);
    const std::vector<int32_t> ids = tokenizer.encode(text);
    lossy += tokenizer.decode(ids) != text;
    write_ids(out, ids);
    write_ids(out, tokenizer.encode_marked(text));
  }
  std::printf("%d\n", lossy);  // texts that do not come back byte by byte
  return out.good() ? 0 : 1;
}

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

int speed(const Tokenizer& tokenizer, const std::string& in) {
  std::vector<std::string> texts;
  for (const std::string& hex : lines_of(in)) texts.push_back(from_hex(hex));
  double bytes = 0, best = 0;
  for (const std::string& text : texts) bytes += static_cast<double>(text.size());
  for (int round = 0; round < 5; ++round) {
    size_t tokens = 0;
    const double start = thread_seconds();
    for (const std::string& text : texts) tokens += tokenizer.encode_marked(text).size();
    const double seconds = thread_seconds() - start;
    if (tokens > 0) best = std::max(best, bytes / seconds / 1e6);
  }
  std::printf("%.2f\n", best);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() < 3) return 2;
  fp4t::TokenizerSpec spec;
  spec.kind = args[1].ends_with(".model") ? "sentencepiece" : "json";
  spec.path = args[1];
  try {
    std::unique_ptr<Tokenizer> tokenizer;
    try {
      tokenizer = fp4t::make_tokenizer(spec);
    } catch (
        const fp4t::RecipeError&) {  // a vocabulary whose end of a document has no usual name: any will do
      spec.end_of_document = "a";
      tokenizer = fp4t::make_tokenizer(spec);
    }
    if (args[0] == "encode" && args.size() == 4) return encode(*tokenizer, args[2], args[3]);
    return args[0] == "speed" ? speed(*tokenizer, args[2]) : 2;
  } catch (const fp4t::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return static_cast<int>(e.code());
  }
}
