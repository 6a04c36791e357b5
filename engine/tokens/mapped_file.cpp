#include "engine/tokens/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "kernels/base/text.h"

namespace fp4t {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO must not hang the run
  if (fd < 0) throw MissingInputError("cannot open " + printable(path) + ": " + std::strerror(errno));
  struct stat status {};
  const bool known = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  size_ = known ? static_cast<size_t>(status.st_size) : 0;
  void* data = size_ > 0 ? ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0) : nullptr;
  const int reason = errno;
  ::close(fd);
  if (!known) throw BadDataError("'" + printable(path) + "' is no regular file");
  if (data == MAP_FAILED)
    throw MissingInputError("cannot map " + printable(path) + ": " + std::strerror(reason));
  data_ = static_cast<const char*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<char*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

}  // namespace fp4t
