#include "engine/store/safetensors_header.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

using Json = nlohmann::json;

// Accepts exactly {name: {dtype, shape, data_offsets}, "__metadata__": {text: text}}.
class HeaderEvents : public nlohmann::json_sax<Json> {
 public:
  HeaderEvents(const std::string& path, std::vector<StoredTensor>* tensors,
               std::map<std::string, std::string>* metadata)
      : path_(path), tensors_(tensors), metadata_(metadata) {}

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("true or false"); }
  bool number_float(double, const std::string& text) override { return unexpected("number " + text); }
  bool binary(Json::binary_t&) override { return unexpected("binary"); }
  bool number_integer(int64_t value) override { return unexpected("number " + std::to_string(value)); }

  bool number_unsigned(uint64_t value) override {
    if (where_ != Where::kShape && where_ != Where::kOffsets) {
      return unexpected("number " + std::to_string(value));
    }
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return unexpected("number " + std::to_string(value));
    }
    numbers_.push_back(static_cast<int64_t>(value));
    if (where_ == Where::kOffsets && numbers_.size() > 2) return unexpected("third data offset");
    return true;
  }

  bool string(std::string& value) override {
    if (where_ == Where::kMetadata) {
      (*metadata_)[field_] = value;
      return true;
    }
    if (where_ != Where::kTensor || field_ != "dtype") return unexpected("text '" + printable(value) + "'");
    try {
      tensors_->back().dtype = FileType::from_name(value);
    } catch (const BadDataError&) {
      refuse("has the unsupported type '" + printable(value) +
             "' (supported: F32, BF16, F16, F8_E4M3, F64, I32, I64, U8)");
    }
    return true;
  }

  bool start_object(size_t) override {
    if (where_ == Where::kOutside) {
      where_ = Where::kTop;
    } else if (where_ == Where::kTop && name_ == "__metadata__") {
      where_ = Where::kMetadata;
    } else if (where_ == Where::kTop) {
      tensors_->push_back({name_, FileType::kU8, {}, 0, 0});
      fields_.clear();
      where_ = Where::kTensor;
    } else {
      return unexpected("{");
    }
    return true;
  }

  bool end_object() override {
    if (where_ == Where::kTensor && fields_.size() != 3) refuse("lacks dtype, shape or data_offsets");
    where_ = where_ == Where::kTop ? Where::kOutside : Where::kTop;
    return true;
  }

  bool key(std::string& value) override {
    if (where_ == Where::kTop) {
      name_ = value;
      if (!names_.insert(value).second) refuse("is there twice");
      return true;
    }
    field_ = value;
    if (where_ == Where::kMetadata) {
      if (metadata_->count(value) != 0) return unexpected("second '" + printable(value) + "'");
      return true;
    }
    if (value != "dtype" && value != "shape" && value != "data_offsets") {
      return unexpected("key '" + printable(value) + "'");
    }
    if (!fields_.insert(value).second) return unexpected("second '" + printable(value) + "'");
    return true;
  }

  bool start_array(size_t) override {
    numbers_.clear();
    if (where_ == Where::kTensor && field_ == "shape") {
      where_ = Where::kShape;
    } else if (where_ == Where::kTensor && field_ == "data_offsets") {
      where_ = Where::kOffsets;
    } else {
      return unexpected("[");
    }
    return true;
  }

  bool end_array() override {
    StoredTensor& tensor = tensors_->back();
    if (where_ == Where::kShape) {
      tensor.dims = numbers_;
    } else {
      if (numbers_.size() != 2) refuse("needs two data offsets");
      tensor.begin = numbers_[0];
      tensor.end = numbers_[1];
    }
    where_ = Where::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const Json::exception& error) override {
    throw BadDataError(detail::concat("'", printable(path_), "': header is no JSON at byte ", position, ": ",
                                      printable(error.what())));
  }

 private:
  enum class Where : uint8_t { kOutside, kTop, kMetadata, kTensor, kShape, kOffsets };

  [[noreturn]] void refuse(const std::string& why) {
    throw BadDataError(detail::concat("'", printable(path_), "': tensor '", printable(name_), "' ", why));
  }
  bool unexpected(const std::string& what) {
    if (where_ == Where::kOutside) {
      throw BadDataError(detail::concat("'", printable(path_), "': header is no JSON object: ", what));
    }
    refuse(detail::concat("has an unexpected ", what, field_.empty() ? "" : " at ", printable(field_)));
  }

  const std::string& path_;
  std::vector<StoredTensor>* tensors_;
  std::map<std::string, std::string>* metadata_;
  Where where_ = Where::kOutside;
  std::string name_, field_;
  std::set<std::string> names_, fields_;
  std::vector<int64_t> numbers_;
};

}  // namespace

void parse_safetensors_header(const std::string& path, const std::string& header,
                              std::vector<StoredTensor>* tensors,
                              std::map<std::string, std::string>* metadata) {
  // The format wants the brace first; the JSON reader would skip spaces and a byte order mark.
  if (header.empty() || header[0] != '{') {
    throw BadDataError(detail::concat("'", printable(path), "': the header does not begin with {"));
  }
  HeaderEvents events(path, tensors, metadata);
  Json::sax_parse(header, &events);
}

std::string safetensors_header(const std::vector<TensorToStore>& tensors,
                               const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t begin = 0;
  for (const TensorToStore& t : tensors) {
    const int64_t end = begin + stored_bytes(t.dtype, t.dims);
    header[t.name] = {{"dtype", t.dtype.name()}, {"shape", t.dims}, {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

}  // namespace fp4t
