#include "engine/store/safetensors.h"

#include <xxhash.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>
#include <utility>

#include "engine/store/safetensors_header.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = int64_t{64} << 20;

// false when the size does not fit 63 bits.
bool bytes_of(FileType dtype, const std::vector<int64_t>& dims, int64_t* bytes) {
  int64_t n = dtype.bytes();
  for (const int64_t d : dims) {
    if (d < 0 || __builtin_mul_overflow(n, d, &n)) return false;
  }
  *bytes = n;
  return true;
}

struct TypeFacts {
  const char* name;
  int64_t bytes;
};
constexpr TypeFacts kTypes[] = {{"F32", 4}, {"BF16", 2}, {"F64", 8}, {"I32", 4},
                                {"I64", 8}, {"U8", 1},   {"F16", 2}, {"F8_E4M3", 1}};  // by FileType::Kind

}  // namespace

int64_t FileType::bytes() const { return kTypes[kind_].bytes; }
const char* FileType::name() const { return kTypes[kind_].name; }

FileType FileType::from_name(std::string_view name) {
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    if (name == kTypes[i].name) return static_cast<Kind>(i);
  }
  throw BadDataError("unknown tensor type '" + printable(name) + "'");
}

std::string dims_text(const std::vector<int64_t>& dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) out += (i ? ", " : "") + std::to_string(dims[i]);
  return out + "]";
}

std::vector<int64_t> dims_of(const Shape& shape) {
  std::vector<int64_t> dims;
  for (int i = 0; i < shape.rank(); ++i) dims.push_back(shape[i]);
  return dims;
}

int64_t stored_bytes(FileType dtype, const std::vector<int64_t>& dims) {
  int64_t bytes = 0;
  FP4T_CHECK(bytes_of(dtype, dims, &bytes), "shape ", dims_text(dims));
  return bytes;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(path), file_(std::make_shared<InputFile>(path)) {
  if (file_->size() < kLengthBytes) {
    throw BadDataError(detail::concat("'", printable(path), "': ", file_->size(),
                                      " bytes are too few for a safetensors file"));
  }
  uint8_t length[kLengthBytes];
  file_->read_at(0, kLengthBytes, length);
  uint64_t header_bytes = 0;
  for (int i = 0; i < 8; ++i) header_bytes |= uint64_t{length[i]} << (8 * i);
  const int64_t available = file_->size() - kLengthBytes;
  if (header_bytes > static_cast<uint64_t>(std::min(available, kMaxHeaderBytes))) {
    throw BadDataError(detail::concat("'", printable(path), "': header of ", header_bytes,
                                      " bytes, the file has ", available, " after the length (at most ",
                                      kMaxHeaderBytes, " are accepted)"));
  }
  data_begin_ = kLengthBytes + static_cast<int64_t>(header_bytes);
  std::string head(static_cast<size_t>(data_begin_), '\0');
  file_->read_at(0, data_begin_, head.data());
  header_hash_ = XXH3_64bits(head.data(), head.size());
  parse_safetensors_header(path, head.substr(kLengthBytes), &tensors_, &metadata_);
  check_layout(file_->size() - data_begin_);
}

void SafetensorsFile::check_layout(int64_t data_bytes) {
  const auto refuse = [this](const StoredTensor& t, const std::string& why) {
    throw BadDataError(detail::concat("'", printable(path_), "': tensor '", printable(t.name), "' ", why));
  };
  for (const StoredTensor& t : tensors_) {
    int64_t bytes = 0;
    if (!bytes_of(t.dtype, t.dims, &bytes)) refuse(t, "has an impossible shape " + dims_text(t.dims));
    if (t.begin > t.end || t.end > data_bytes) {
      refuse(t, detail::concat("lies at bytes [", t.begin, ", ", t.end, ") of ", data_bytes, " of data"));
    }
    if (t.bytes() != bytes) {
      refuse(t, detail::concat("takes ", t.bytes(), " bytes, its shape ", dims_text(t.dims), " of ",
                               t.dtype.name(), " needs ", bytes));
    }
  }
  std::sort(tensors_.begin(), tensors_.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  int64_t filled = 0;
  for (const StoredTensor& t : tensors_) {
    if (t.begin < filled) refuse(t, detail::concat("overlaps the tensor before it, which ends at ", filled));
    if (t.begin > filled)
      refuse(t, detail::concat("begins at ", t.begin, " after unused bytes from ", filled));
    filled = t.end;
    index_.emplace(t.name, index_.size());
  }
  if (filled != data_bytes) {
    const std::string last = tensors_.empty() ? "" : printable(tensors_.back().name);
    throw BadDataError(detail::concat("'", printable(path_), "': ", data_bytes - filled,
                                      " bytes after the last tensor '", last, "' belong to none"));
  }
}

const StoredTensor& SafetensorsFile::find(const std::string& name) const {
  const auto it = index_.find(name);
  if (it == index_.end()) {
    throw BadDataError(detail::concat("'", printable(path_), "': tensor '", printable(name), "' is missing"));
  }
  return tensors_[it->second];
}

void SafetensorsFile::read_into(const StoredTensor& tensor, void* host) const {
  file_->read_at(data_begin_ + tensor.begin, tensor.bytes(), host);
}

std::vector<uint8_t> SafetensorsFile::read(const StoredTensor& tensor) const {
  std::vector<uint8_t> out(static_cast<size_t>(tensor.bytes()));
  read_into(tensor, out.data());
  return out;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorToStore> tensors,
                                     const std::map<std::string, std::string>& metadata, const SaveHook& hook)
    : tensors_(std::move(tensors)), file_(path, hook) {
  std::set<std::string> names;
  for (const TensorToStore& t : tensors_) {
    FP4T_CHECK(names.insert(t.name).second && t.name != "__metadata__", "tensor '", t.name, "'");
  }
  std::stable_sort(tensors_.begin(), tensors_.end(), [](const TensorToStore& a, const TensorToStore& b) {
    const int64_t wide_a = a.dtype.bytes(), wide_b = b.dtype.bytes();
    return wide_a != wide_b ? wide_a > wide_b : a.name < b.name;
  });
  const std::string header = safetensors_header(tensors_, metadata);
  std::string head(kLengthBytes, '\0');
  for (size_t i = 0; i < kLengthBytes; ++i) head[i] = static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  head += header;
  header_hash_ = XXH3_64bits(head.data(), head.size());
  file_bytes_ = static_cast<int64_t>(head.size());
  for (const TensorToStore& t : tensors_) file_bytes_ += stored_bytes(t.dtype, t.dims);
  file_.write(head.data(), static_cast<int64_t>(head.size()));
}

void SafetensorsWriter::write_next(const void* host) {
  FP4T_CHECK(next_ < tensors_.size(), "all ", tensors_.size(), " tensors are written");
  const TensorToStore& t = tensors_[next_++];
  file_.write(host, stored_bytes(t.dtype, t.dims));
}

void SafetensorsWriter::finish() {
  FP4T_CHECK_EQ(next_, tensors_.size());
  file_.finish();
}

void write_safetensors(const std::string& path, const std::vector<TensorToStore>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  SafetensorsWriter writer(path, tensors, metadata, {});
  for (size_t i = 0; i < writer.order().size(); ++i) writer.write_next(writer.order()[i].data);
  writer.finish();
}

}  // namespace fp4t
