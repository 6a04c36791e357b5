#include "engine/stage/selfcheck.h"

#include <nlohmann/json.hpp>
#include <sstream>

#include "engine/metrics/json_line.h"
#include "kernels/base/numeric.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"
#include "kernels/formats/quant.h"
#include "kernels/ops/run.h"

namespace fp4t {

namespace {

using Json = nlohmann::json;
using Bytes = std::vector<uint8_t>;

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  throw BadDataError(
      detail::concat("'", printable(std::string(1, c)), "' is not a lower-case hexadecimal digit"));
}

Bytes parse_hex(const Json& object, const char* key, int64_t expected_bytes) {
  const std::string& text = object.at(key).get_ref<const std::string&>();
  if (static_cast<int64_t>(text.size()) != 2 * expected_bytes) {
    throw BadDataError(
        detail::concat(key, " has ", text.size(), " digits, the shape asks for ", 2 * expected_bytes));
  }
  Bytes out(text.size() / 2);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<uint8_t>(hex_digit(text[2 * i]) << 4 | hex_digit(text[2 * i + 1]));
  }
  return out;
}

// The enumerator whose name is `text`.
template <class Enum>
Enum parse_name(const Json& object, const char* key, std::initializer_list<Enum> values) {
  const std::string& text = object.at(key).get_ref<const std::string&>();
  for (Enum v : values) {
    if (text == name_of(v)) return v;
  }
  throw BadDataError(detail::concat("unknown ", key, " '", printable(text), "'"));
}

QuantSpec parse_spec(const Json& c) {
  QuantSpec spec;
  spec.format = parse_name(c, "format", {Format::kNvfp4, Format::kMxfp8});
  if (spec.format == Format::kMxfp8) return spec;
  spec.block = parse_name(c, "block", {BlockShape::k1x16, BlockShape::k16x16});
  spec.scale_rule = parse_name(c, "scale_rule", {ScaleRule::kAmax, ScaleRule::kFourOverSix});
  spec.scale_scope = parse_name(c, "scale_scope", {ScaleScope::kTensor, ScaleScope::kRow});
  spec.scale_round = parse_name(c, "scale_round", {ScaleRound::kFp32, ScaleRound::kPow2});
  return spec;
}

// Memory of the queue's backend, given back at the end of the scope.
class QueueBytes {
 public:
  QueueBytes(Queue& queue, int64_t bytes)
      : queue_(queue), bytes_(bytes), data_(bytes > 0 ? queue.allocate(bytes) : nullptr) {}
  ~QueueBytes() {
    if (data_) queue_.release(data_);
  }
  QueueBytes(const QueueBytes&) = delete;
  QueueBytes& operator=(const QueueBytes&) = delete;
  void* data() const { return data_; }
  void write(const Bytes& from) { queue_.copy_from_host(data_, from.data(), bytes_); }
  Bytes read() const {
    Bytes out(static_cast<size_t>(bytes_));
    queue_.copy_to_host(out.data(), data_, bytes_);
    return out;
  }

 private:
  Queue& queue_;
  int64_t bytes_;
  void* data_;
};

// Empty when equal, else the first difference.
std::string first_difference(const char* what, const Bytes& got, const Bytes& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] == expected[i]) continue;
    return detail::concat(" ", what, " byte ", i, " is ", int{got[i]}, ", expected ", int{expected[i]}, ";");
  }
  return "";
}

// Quantises one case and returns what differs from it.
std::string run_case(Queue& queue, const Json& c, const TensorView& x) {
  const QuantSpec spec = parse_spec(c);
  QuantView out = quant_layout(spec, GroupAxis::kRows, 1, x.dim(0), x.dim(1));
  const bool has_tensor_scale = spec.format == Format::kNvfp4;
  const Bytes codes = parse_hex(c, "codes", code_bytes(out));
  const Bytes block_scales = parse_hex(c, "block_scales", block_scale_bytes(out));
  const Bytes tensor_scale =
      has_tensor_scale ? parse_hex(c, "tensor_scale_f32", tensor_scale_bytes(out)) : Bytes();

  QueueBytes got_codes(queue, code_bytes(out)), got_block_scales(queue, block_scale_bytes(out));
  QueueBytes got_tensor_scale(queue, tensor_scale_bytes(out));
  out.codes.data = got_codes.data();
  out.block_scales.data = got_block_scales.data();
  if (has_tensor_scale) out.tensor_scale.data = got_tensor_scale.data();
  Quantize op{};
  op.x = x;
  op.orientation = Orientation::kRow;
  op.out = out;
  run(queue, op);
  queue.synchronize();
  std::string failure = first_difference("codes", got_codes.read(), codes) +
                        first_difference("block_scales", got_block_scales.read(), block_scales) +
                        first_difference("tensor_scale", got_tensor_scale.read(), tensor_scale);
  return failure.empty() ? "" : describe(spec) + ":" + failure;
}

void check_line(Queue& queue, const Json& line, GoldenResult& result) {
  const int64_t rows = line.at("rows").get<int64_t>(), cols = line.at("cols").get<int64_t>();
  if (rows < 1 || cols < 1 || rows > 1 << 20 || cols > 1 << 20) {
    throw BadDataError(detail::concat("a matrix of ", rows, " x ", cols));
  }
  const Bytes values =
      parse_hex(line, "input_bf16", rows * cols * 2);  // sizes hold before they are allocated
  QueueBytes input(queue, rows * cols * 2);
  input.write(values);
  const TensorView x{input.data(), DType::kBf16, {rows, cols}};
  const Json& cases = line.at("cases");
  if (!cases.is_array() || cases.empty()) throw BadDataError("no cases");
  for (const Json& c : cases) {
    ++result.cases;
    const std::string failure = run_case(queue, c, x);
    if (failure.empty()) {
      ++result.equal;
    } else {
      result.failures.push_back(detail::concat("seed ", line.at("seed").get<int64_t>(), " (",
                                               printable(line.at("kind").get<std::string>()), ", ", rows,
                                               " x ", cols, ") ", failure));
    }
  }
}

}  // namespace

GoldenResult check_golden(Queue& queue, const std::string& path) {
  std::istringstream file(read_text_file(path));
  GoldenResult result;
  std::string text;
  for (int64_t number = 1; std::getline(file, text); ++number) {
    if (text.empty()) continue;
    try {
      check_line(queue, Json::parse(text), result);
    } catch (const Json::exception& e) {
      throw BadDataError(detail::concat(printable(path), ":", number, ": ", json_problem(e)));
    } catch (const BadDataError& e) {
      throw BadDataError(detail::concat(printable(path), ":", number, ": ", e.what()));
    }
  }
  if (result.cases == 0) throw BadDataError(detail::concat(printable(path), ": holds no golden vectors"));
  return result;
}

}  // namespace fp4t
