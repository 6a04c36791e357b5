#include "engine/tokens/hash.h"

#include <xxhash.h>

#include <cstdio>
#include <new>

namespace fp4t {

namespace {

std::string hex_of(XXH64_hash_t hash) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

XXH3_state_t* state_of(const std::shared_ptr<void>& state) { return static_cast<XXH3_state_t*>(state.get()); }

}  // namespace

std::string xxh3_hex(std::string_view bytes) { return hex_of(XXH3_64bits(bytes.data(), bytes.size())); }

Xxh3Stream::Xxh3Stream()
    : state_(XXH3_createState(), [](void* state) { XXH3_freeState(static_cast<XXH3_state_t*>(state)); }) {
  if (!state_) throw std::bad_alloc();
  XXH3_64bits_reset(state_of(state_));
}

void Xxh3Stream::add(const void* data, size_t size) { XXH3_64bits_update(state_of(state_), data, size); }

std::string Xxh3Stream::hex() const { return hex_of(XXH3_64bits_digest(state_of(state_))); }

}  // namespace fp4t
