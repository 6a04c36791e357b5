// What ranks tell each other about their work: small, on the host, the same on every rank afterwards.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/comm/comm.h"

namespace fp4t {

// Every rank's bytes, by rank.
std::vector<std::string> gather_texts(Communicator& comm, const std::string& mine);

// The root's text on every rank.
std::string broadcast_text(Communicator& comm, const std::string& text, int root);

// Sums by name, each in rank order; names may be missing on some ranks.
std::map<std::string, double> sum_by_name(Communicator& comm, const std::map<std::string, double>& mine);

// Where facts that should be the same are not: "rank 2: name" of the first that differs from rank 0's, or "".
// All ranks get the same answer.
std::string first_difference(Communicator& comm, const std::map<std::string, std::string>& facts);

// Rank 0 runs `body`, the others wait; what it throws is thrown on every rank.
void on_rank_zero(Communicator& comm, const std::function<void()>& body);

}  // namespace fp4t
