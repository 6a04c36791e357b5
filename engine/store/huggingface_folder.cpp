#include "engine/store/huggingface_folder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/formats/bf16.h"

namespace fp4t {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kMaxIndexBytes = int64_t{64} << 20;

// IEEE binary16, exactly.
float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits >> 15) << 31, fraction = bits & 0x3FFu;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  if (exponent == 0) {  // zero and subnormals: a whole number of 2^-24
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t widened = exponent == 31 ? 255 : exponent - 15 + 127;
  const uint32_t word = sign | widened << 23 | fraction << 13;
  float out;
  std::memcpy(&out, &word, sizeof out);
  return out;
}

// false for types that are no weights.
bool widen(FileType type, const std::vector<uint8_t>& bytes, float* out) {
  if (type == FileType::kF32) {
    std::memcpy(out, bytes.data(), bytes.size());
    return true;
  }
  if (type != FileType::kBf16 && type != FileType::kF16) return false;
  for (size_t i = 0; 2 * i < bytes.size(); ++i) {
    Bf16 x;
    std::memcpy(&x, bytes.data() + 2 * i, sizeof x);
    out[i] = type == FileType::kBf16 ? bf16_to_f32(x) : f16_to_f32(x.bits);
  }
  return true;
}

}  // namespace

HuggingFaceFolder::HuggingFaceFolder(const std::string& folder, const ModelSpec& model,
                                     const std::vector<ParamInfo>& parameters)
    : folder_(folder) {
  const std::string index = folder + "/model.safetensors.index.json";
  if (path_exists(index)) {
    if (path_exists(folder + "/model.safetensors")) {  // of which the library would take the other one
      throw BadDataError("'" + printable(folder) +
                         "' has both model.safetensors and model.safetensors.index.json: two models, or one "
                         "that was written over another");
    }
    open_indexed(index);
  } else {
    open("model.safetensors");
  }
  match(model, parameters);
}

void HuggingFaceFolder::open(const std::string& file) {
  const auto opened = std::make_shared<SafetensorsFile>(folder_ + "/" + file);
  files_[file] = opened;
  for (const StoredTensor& t : opened->tensors()) {
    const auto [it, fresh] = place_.emplace(t.name, file);
    if (!fresh) {
      throw BadDataError(detail::concat("'", printable(opened->path()), "': tensor '", printable(t.name),
                                        "' is also in '", printable(it->second), "'"));
    }
  }
}

void HuggingFaceFolder::open_indexed(const std::string& index) {
  const auto refuse = [&](const std::string& why) {
    throw BadDataError("'" + printable(index) + "': " + why);
  };
  std::map<std::string, std::string> listed;
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > 8) refuse("nested too deeply");
    return true;
  };
  try {
    const Json json = Json::parse(read_small_file(index, kMaxIndexBytes), shallow);
    listed = json.at("weight_map").get<std::map<std::string, std::string>>();
  } catch (const Json::exception& error) {
    refuse(printable(error.what()));
  }
  for (const auto& [name, file] : listed) {
    if (fs::path(file).filename().string() != file || file.empty() || file == "..") {
      refuse("'" + printable(file) + "' is no file of this folder");
    }
    if (files_.count(file) == 0) open(file);
  }
  for (const auto& [name, file] : listed) {
    const auto it = place_.find(name);
    if (it == place_.end() || it->second != file) {
      refuse("tensor '" + printable(name) + "' is not in '" + printable(file) + "'");
    }
  }
  for (const auto& [name, file] : place_) {
    if (listed.count(name) == 0)
      refuse("tensor '" + printable(name) + "' of '" + printable(file) + "' is not listed");
  }
}

// The names that this folder has for a parameter.
std::vector<LibraryPiece> HuggingFaceFolder::pieces_of(const ParamInfo& info, const ModelSpec& model) const {
  std::vector<LibraryPiece> stacked = library_pieces(info, model, ExpertLayout::kStacked);
  if (place_.count(stacked[0].name) != 0) return stacked;
  return library_pieces(info, model, ExpertLayout::kSeparate);
}

void HuggingFaceFolder::match(const ModelSpec& model, const std::vector<ParamInfo>& parameters) {
  std::set<std::string> wanted;
  for (const ParamInfo& info : parameters) {
    pieces_.push_back(pieces_of(info, model));
    for (const LibraryPiece& piece : pieces_.back()) {
      if (place_.count(piece.name) == 0) {
        throw BadDataError("'" + printable(folder_) + "': tensor '" + piece.name + "' is missing");
      }
      const SafetensorsFile& file = file_of(piece.name);
      const StoredTensor& t = file.find(piece.name);
      if (t.dims != piece.dims) {
        throw BadDataError(detail::concat("'", printable(file.path()), "': tensor '", piece.name,
                                          "' has shape ", dims_text(t.dims), ", the model needs ",
                                          dims_text(piece.dims)));
      }
      wanted.insert(piece.name);
    }
  }
  for (const auto& [name, file] : place_) {
    if (wanted.count(name) != 0) continue;
    if (name == "lm_head.weight" && model.tied_head) {
      match_tied_head();
      continue;
    }
    throw BadDataError(detail::concat("'", printable(file_of(name).path()), "': tensor '", printable(name),
                                      "' has no place in the model"));
  }
}

// Some tied models store the head as well.
void HuggingFaceFolder::match_tied_head() const {
  const auto stored = [&](const char* name) {
    const SafetensorsFile& file = file_of(name);
    const StoredTensor& t = file.find(name);
    return std::pair(t.dims, file.read(t));
  };
  if (stored("lm_head.weight") == stored("model.embed_tokens.weight")) return;
  throw BadDataError("'" + printable(file_of("lm_head.weight").path()) +
                     "': tensor 'lm_head.weight' is not the embedding, but config.json ties them");
}

std::vector<float> HuggingFaceFolder::read(size_t index) const {
  int64_t elements = 0;
  for (const LibraryPiece& piece : pieces_[index]) elements += piece.elements();
  std::vector<float> values(static_cast<size_t>(elements));
  for (const LibraryPiece& piece : pieces_[index]) {
    const SafetensorsFile& file = file_of(piece.name);
    const StoredTensor& t = file.find(piece.name);
    const auto refuse = [&](const std::string& why) {
      throw BadDataError(detail::concat("'", printable(file.path()), "': tensor '", piece.name, "' ", why));
    };
    float* out = values.data() + piece.offset;
    if (!widen(t.dtype, file.read(t), out)) {
      refuse(detail::concat("is ", t.dtype.name(), ", weights are F32, BF16 or F16"));
    }
    float* const end = out + piece.elements();
    float* const bad = std::find_if(out, end, [](float v) { return !std::isfinite(v); });
    if (bad != end) refuse(detail::concat("holds ", *bad, " as its element ", bad - out));
  }
  return values;
}

}  // namespace fp4t
