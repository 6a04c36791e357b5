// The files of configs/machines as the build found them; the definition is made by CMake from
// machine_texts.cpp.in.
#pragma once

#include <vector>

namespace fp4t {

struct MachineText {
  const char *name, *text;
};
extern const std::vector<MachineText> kMachineTexts;

}  // namespace fp4t
