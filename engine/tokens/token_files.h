// Files of tokens.
//   megatron   NAME.idx and NAME.bin, as Megatron-LM writes them. NAME.idx: 9 bytes "MMIDIDX\0\0"; u64
//              version 1; u8 dtype (1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16); u64 number of
//              sequences; u64 entries of the document index; from byte 34 on int32 lengths of the sequences,
//              int64 bytes of NAME.bin where they begin, int64 document index: the first sequence of each
//              document, and the number of sequences; int8 modes, one a sequence, maybe.
//   llmc       llm.c: 256 int32 (magic 20240520, version 1: uint16 tokens; magic 20240801, version 7: uint32;
//              then the number of tokens), tokens. A document begins with the end-of-document token.
//   nanogpt    nothing but tokens, uint16 or uint32. A document ends with the end-of-document token.
// All little-endian.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokens/mapped_file.h"

namespace fp4t {

enum class TokenType : uint8_t { kU8, kI8, kI16, kI32, kI64, kU16, kU32 };
int64_t token_bytes(TokenType type);

// A row of tokens in a file, and where documents end in it.
struct TokenFile {
  MappedFile file;
  TokenType type;
  int64_t begin;  // byte of the first token
  int64_t count;
  std::vector<int64_t> document_ends;  // in tokens; empty until they are looked for
  std::string hash;
  std::string noted_hash;  // of the file, by who wrote it; "": not known

  int64_t byte_of(int64_t token) const { return begin + token * token_bytes(type); }
  // Throws BadDataError naming file and byte when a token is not in [0, vocabulary).
  void read(int64_t from, int64_t tokens, int64_t vocabulary, int32_t* out) const;
  // All of them, and the noted hash. Throws BadDataError.
  void check(int64_t vocabulary) const;
};

// `index`: NAME.idx. `fingerprint`: the tokenizer's; where NAME.tokens.json lies beside it, as `fp4train
// tokenize` writes it, both must agree. Throws MissingInputError, BadDataError naming file and byte.
TokenFile open_megatron(const std::string& index, const std::string& fingerprint);
TokenFile open_llmc(const std::string& path);
TokenFile open_nanogpt(const std::string& path, const std::string& dtype);

// Files that a source's expanded paths mean: for megatron each NAME.idx once, whichever of its files is
// named.
std::vector<std::string> megatron_indices(const std::vector<std::string>& paths);

// Type that Megatron-LM takes for a vocabulary, and its code.
TokenType megatron_type(int64_t vocabulary);
// NAME.idx of documents of one sequence each.
std::string megatron_index(TokenType type, const std::vector<int32_t>& lengths);

}  // namespace fp4t
