// How files are read whole. A stream of the standard library ends early and says nothing where the system
// refuses to read on, and a folder opens like an empty file; here either is an error with the path and the
// system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace fp4t {

// The whole of a regular file. Throws MissingInputError when it cannot be opened, else BadDataError.
std::string read_text_file(const std::string& path);

// The same, at most so many bytes from its beginning; nothing when there is no such file.
std::optional<std::string> read_text_file_if_there(const std::string& path, size_t most = SIZE_MAX);

}  // namespace fp4t
