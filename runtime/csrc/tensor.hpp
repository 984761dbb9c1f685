// What one call updates, and the numbers of its step. The layout is mirrored in runtime/kernels.py; the meaning of every
// array and the arithmetic are specified in runtime/hybrid8.py.
#pragma once
#include <cstdint>

namespace lazysched {

constexpr int64_t kBlock = 256;
constexpr float kSmallestScale = 0x1p-80f;
constexpr float kReciprocal[3] = {2.12121254f, -1.45454577f, 0.32323235f};
constexpr float kReciprocalTwo = 2.0000510f;
constexpr uint32_t kInverseSeed = 0x7EF31200u;
constexpr float kFirstMagic = 12582912.0f;   // 1.5 * 2^23: the low bits of a sum with it are a signed integer
constexpr float kSecondMagic = 8388608.0f;   // 2^23: likewise, not negative
constexpr float kSecondLowest = 8388610.0f;  // code 2
constexpr float kFirstUnits = 4161536.0f;    // 254 * 2^14

enum Format : int32_t { kBf16Blocks = 0, kFp32Blocks = 1, kBf16Fp32 = 2, kFp32Fp32 = 3 };

struct Tensor {
  void* weight;
  const void* grad;
  void* correction;  // int8 beside 8-bit moments, the fp32 master beside fp32 moments; null with fp32 weights
  void* first;
  void* second;
  float* first_scale;
  float* second_scale;
  int64_t numel;
  uint32_t stream_low, stream_high;
  int32_t format;
  int32_t decays;
};

struct Coefficients {
  float skip, step, first_decay, first_gain, second_decay, second_gain, inverse_k, step_size, epsilon, decay, beta1,
      beta2, second_gain_fp32, k;
};

// Random words of a block are multiplier * element + offset.
struct BlockRandom {
  uint32_t multiplier, offset;
};

inline uint32_t mix32(uint32_t value) {
  value = (value ^ (value >> 16)) * 0x7FEB352Du;
  value = (value ^ (value >> 15)) * 0x846CA68Bu;
  return value ^ (value >> 16);
}

inline BlockRandom random_of(const Tensor& t, const Coefficients& c, int64_t block) {
  const uint32_t low = mix32(mix32(static_cast<uint32_t>(c.step) + t.stream_high) ^ t.stream_low);
  const uint32_t high = mix32(low + t.stream_high);
  const uint32_t offset = mix32(static_cast<uint32_t>(block) ^ low);
  return {mix32(offset + high), offset};
}

// One block of arrays that have all 256 elements.
struct Block {
  void* weight;
  const void* grad;
  int8_t* correction;
  int8_t* first;
  uint8_t* second;
  float* first_scale;
  float* second_scale;
  float decay;  // of the weight
  BlockRandom random;
};

// Blocks [begin, end) of a tensor, whatever its format; fp32 tensors are cut the same way.
using UpdateRange = void (*)(const Tensor&, const Coefficients&, int64_t begin, int64_t end);

}  // namespace lazysched
