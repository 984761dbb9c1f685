// Runs an update on a processor that the tests' Python does not run on: reads a case, writes what it became.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "variants.hpp"

using namespace lazysched;

struct Header {
  int64_t numel;
  int32_t format, decays, variant, steps;
  uint32_t stream_low, stream_high;
};

static std::vector<char> take(FILE* file, size_t bytes) {
  std::vector<char> data(bytes);
  if (fread(data.data(), 1, bytes, file) != bytes) exit(2);
  return data;
}

int main(int, char** arguments) {
  FILE* input = fopen(arguments[1], "rb");
  Header h;
  if (!input || fread(&h, sizeof h, 1, input) != 1) return 2;
  const UpdateRange update = update_range_of(h.variant);
  if (!update) return 3;
  const size_t n = h.numel, blocks = (n + kBlock - 1) / kBlock;
  const bool narrow = h.format == kBf16Blocks || h.format == kBf16Fp32, in_blocks = h.format <= kFp32Blocks;
  const size_t element = narrow ? 2 : 4, moment = in_blocks ? 1 : 4;
  std::vector<std::vector<char>> arrays = {take(input, n * element), take(input, narrow ? n * moment : 0),
                                           take(input, n * moment), take(input, n * moment),
                                           take(input, in_blocks ? blocks * 4 : 0), take(input, in_blocks ? blocks * 4 : 0)};
  for (int step = 0; step < h.steps; ++step) {
    const std::vector<char> coefficients = take(input, sizeof(Coefficients)), grad = take(input, n * element);
    const Tensor tensor = {arrays[0].data(), grad.data(), narrow ? arrays[1].data() : nullptr, arrays[2].data(),
                           arrays[3].data(), reinterpret_cast<float*>(arrays[4].data()),
                           reinterpret_cast<float*>(arrays[5].data()), h.numel, h.stream_low, h.stream_high, h.format,
                           h.decays};
    update(tensor, *reinterpret_cast<const Coefficients*>(coefficients.data()), 0, blocks);
  }
  FILE* output = fopen(arguments[2], "wb");
  for (const auto& array : arrays)
    if (fwrite(array.data(), 1, array.size(), output) != array.size()) return 4;
  return fclose(output);
}
