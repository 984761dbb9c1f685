// The same update compiled for each kind of processor, and which of them run here.
#pragma once
#include "tensor.hpp"

namespace lazysched {

enum Variant : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kNeon = 3 };

// Null where the variant does not exist or does not run on this processor.
UpdateRange update_range_of(int variant);

}  // namespace lazysched
