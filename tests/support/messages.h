// What an error says, and parts that it must say.
#pragma once

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace fp4t::test {

// The message of the Error that `body` throws.
template <class Error, class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace fp4t::test

#define EXPECT_SAYS(message, ...)                                         \
  do {                                                                    \
    const std::string said = (message);                                   \
    for (const std::string& part : std::vector<std::string>{__VA_ARGS__}) \
      EXPECT_NE(said.find(part), std::string::npos) << said;              \
  } while (false)
