// A reader of exported folders, written from the description of the layouts (RELIABILITY.md B4) and from the
// tables of E2M1, E4M3 and E8M0 alone: it shares nothing with the code that writes them. It decides by
// quantization_config what a matrix is, as the engines do that load such folders.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace fp4t::test {

struct RawTensor {
  std::string type;
  std::vector<int64_t> dims;
  std::string bytes;
};

struct ReadMatrix {
  int64_t rows = 0, cols = 0;
  std::vector<float> values;
  bool coded = false;
  std::string codes, block_scales;  // as they lie in the file
  float decode_scale = 1.0f;
};

class ExportedReader {
 public:
  explicit ExportedReader(const std::string& folder) {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() == ".safetensors") read_file(entry.path().string());
    }
    const auto config = nlohmann::json::parse(text_of(folder + "/config.json"));
    if (config.contains("quantization_config")) {
      const auto& q = config.at("quantization_config");
      method_ = q.at("quant_method");
      format_ = q.value("format", q.value("quant_algo", ""));
      for (const auto& name : q.at("ignore")) ignored_.insert(name.get<std::string>());
    }
  }

  const std::map<std::string, RawTensor>& tensors() const { return tensors_; }
  bool is_ignored(const std::string& module) const { return ignored_.count(module) != 0; }

  // `module`: the name without ".weight".
  ReadMatrix matrix(const std::string& module) const {
    const bool packed = tensors_.count(module + ".weight_packed") != 0;
    if (!packed && tensors_.count(module + ".weight_scale") == 0) return plain(module);
    if (is_ignored(module)) throw std::runtime_error(module + " is coded, and to be ignored");
    if (method_ == "modelopt" && format_ == "NVFP4") {
      return nvfp4(module, ".weight", one(module + ".weight_scale_2"));  // a decode scale: multiplied
    }
    if (method_ == "compressed-tensors" && format_ == "nvfp4-pack-quantized") {
      return nvfp4(module, ".weight_packed", 1.0f / one(module + ".weight_global_scale"));  // an encode scale
    }
    if (method_ == "compressed-tensors" && format_ == "mxfp8-quantized") return mxfp8(module);
    throw std::runtime_error(method_ + " " + format_ + " is unknown");
  }

  // Of the activations, as decode scale.
  float input_scale(const std::string& module) const {
    return method_ == "modelopt" ? one(module + ".input_scale") : 1.0f / one(module + ".input_global_scale");
  }

  static float e2m1(unsigned code) {
    constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
  }
  static float e4m3(unsigned byte) {
    const int exponent = static_cast<int>(byte >> 3 & 15), fraction = static_cast<int>(byte & 7);
    if (exponent == 15 && fraction == 7) throw std::runtime_error("an E4M3 NaN");
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                          : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    return (byte & 0x80) != 0 ? -magnitude : magnitude;
  }

 private:
  static std::string text_of(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }

  void read_file(const std::string& path) {
    const std::string all = text_of(path);
    uint64_t length = 0;
    std::memcpy(&length, all.data(), 8);
    const auto header = nlohmann::json::parse(all.substr(8, length));
    for (const auto& [name, t] : header.items()) {
      if (name == "__metadata__") continue;
      const uint64_t begin = t.at("data_offsets").at(0), end = t.at("data_offsets").at(1);
      tensors_[name] = {t.at("dtype"), t.at("shape"), all.substr(8 + length + begin, end - begin)};
    }
  }

  const RawTensor& get(const std::string& name, const std::string& type) const {
    const RawTensor& t = tensors_.at(name);
    if (t.type != type) throw std::runtime_error(name + " is " + t.type + ", not " + type);
    return t;
  }
  float one(const std::string& name) const {
    const RawTensor& t = get(name, "F32");
    const bool scalar = method_ == "modelopt" ? t.dims.empty() : t.dims == std::vector<int64_t>{1};
    if (!scalar) throw std::runtime_error(name + " is no scalar");
    float value = 0;
    std::memcpy(&value, t.bytes.data(), sizeof value);
    return value;
  }
  static unsigned byte_at(const std::string& bytes, int64_t i) {
    return static_cast<unsigned char>(bytes.at(static_cast<size_t>(i)));
  }

  ReadMatrix plain(const std::string& module) const {
    const RawTensor& t = tensors_.at(module + ".weight");
    ReadMatrix out;
    out.rows = t.dims.at(0);
    out.cols = t.dims.size() > 1 ? t.dims.at(1) : 1;
    for (int64_t i = 0; i < out.rows * out.cols; ++i) {
      uint32_t word = 0;
      if (t.type == "F32") {
        std::memcpy(&word, t.bytes.data() + 4 * i, 4);
      } else if (t.type == "BF16") {
        word = byte_at(t.bytes, 2 * i) << 16 | byte_at(t.bytes, 2 * i + 1) << 24;
      } else {
        throw std::runtime_error(module + " is " + t.type);
      }
      float value = 0;
      std::memcpy(&value, &word, 4);
      out.values.push_back(value);
    }
    return out;
  }

  ReadMatrix nvfp4(const std::string& module, const std::string& codes_name, float decode) const {
    const RawTensor& codes = get(module + codes_name, "U8");
    const RawTensor& scales = get(module + ".weight_scale", "F8_E4M3");
    ReadMatrix out{codes.dims.at(0), codes.dims.at(1) * 2, {}, true, codes.bytes, scales.bytes, decode};
    if (scales.dims != std::vector<int64_t>{out.rows, out.cols / 16})
      throw std::runtime_error(module + " scales");
    for (int64_t r = 0; r < out.rows; ++r) {
      for (int64_t c = 0; c < out.cols; ++c) {
        const unsigned both = byte_at(codes.bytes, (r * out.cols + c) / 2);
        const float q = e2m1(c % 2 == 0 ? both & 15 : both >> 4);
        const float scaled = q * e4m3(byte_at(scales.bytes, r * (out.cols / 16) + c / 16));
        out.values.push_back(scaled * decode);
      }
    }
    return out;
  }

  ReadMatrix mxfp8(const std::string& module) const {
    const RawTensor& codes = get(module + ".weight", "F8_E4M3");
    const RawTensor& scales = get(module + ".weight_scale", "U8");
    ReadMatrix out{codes.dims.at(0), codes.dims.at(1), {}, true, codes.bytes, scales.bytes, 1.0f};
    if (scales.dims != std::vector<int64_t>{out.rows, out.cols / 32})
      throw std::runtime_error(module + " scales");
    for (int64_t r = 0; r < out.rows; ++r) {
      for (int64_t c = 0; c < out.cols; ++c) {
        const auto exponent = static_cast<int>(byte_at(scales.bytes, r * (out.cols / 32) + c / 32)) - 127;
        out.values.push_back(std::ldexp(e4m3(byte_at(codes.bytes, r * out.cols + c)), exponent));
      }
    }
    return out;
  }

  std::map<std::string, RawTensor> tensors_;
  std::string method_, format_;
  std::set<std::string> ignored_;
};

}  // namespace fp4t::test
