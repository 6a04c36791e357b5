#include "tests/support/tensors.h"
