// Work that ranks share besides training: generation, and what they gather of it.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/rl/sampler.h"
#include "engine/stage/context.h"

namespace fp4t {

// Completions of this rank's requests. `doing` stands before "120/512" in the status. With several ranks, all
// of them call it, with requests or without; every few decode calls they agree whether to stop, and the ones
// that are done wait for the others.
std::vector<Completion> generate_together(Run& run, const Pass& pass,
                                          const std::vector<GenerateRequest>& requests,
                                          GenerateOptions options, const std::string& doing);

// What is verified and rewarded of a completion: its text without the end token.
std::string answer_text(const Tokenizer& tokenizer, const Completion& completion);

// Lists of all ranks, in rank order.
std::vector<std::vector<int32_t>> gather_lists(Communicator& comm, std::vector<std::vector<int32_t>> mine);
std::vector<std::vector<float>> gather_lists(Communicator& comm, std::vector<std::vector<float>> mine);
std::vector<std::vector<uint8_t>> gather_lists(Communicator& comm, std::vector<std::vector<uint8_t>> mine);
std::vector<uint8_t> gather_list(Communicator& comm, const std::vector<uint8_t>& mine);

}  // namespace fp4t
