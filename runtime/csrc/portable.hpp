// The update of a block in plain C++: the variant for any processor, and what vector variants turn to for blocks with
// numbers that are not finite.
#pragma once
#include <cmath>
#include <cstring>

#include "tensor.hpp"

namespace lazysched::portable {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline bool is_finite(float value) { return (bits_of(value) & 0x7F800000u) != 0x7F800000u; }

inline float reciprocal(float d) {
  const float y = std::fma(std::fma(kReciprocal[2], d, kReciprocal[1]), d, kReciprocal[0]);
  return y * std::fma(-d, y, kReciprocalTwo);
}

inline float inverse(float d) {
  const float y = float_of(kInverseSeed - bits_of(d));
  const float e = std::fma(-d, y, 1.0f);
  return std::fma(y, std::fma(e, e, e), y);
}

inline float bf16(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

inline float master_of(uint16_t weight, int8_t correction) {
  const uint32_t low = (weight & 0x7FFF) == 0 && correction < 0 ? 0u : static_cast<uint32_t>(correction) << 8;
  return float_of((static_cast<uint32_t>(weight) << 16) + low);
}

inline void store_bf16(float x, uint32_t random, uint16_t& weight, int8_t& correction) {
  const uint32_t bits = bits_of(x) + random;
  const bool finite = is_finite(x);
  const uint32_t special = std::isnan(x) ? 0x7FC0u : bits_of(x) >> 16;
  weight = static_cast<uint16_t>(finite ? (bits + 0x8000u) >> 16 : special);
  correction = finite ? static_cast<int8_t>(bits >> 8) : 0;
}

// Scale of the largest magnitudes of a block, and whether codes other than 0 exist.
struct Scale {
  float most;
  bool coded;
};

inline Scale scale_of(const float* magnitude) {
  float most = 0.0f;
  for (int i = 0; i < kBlock; ++i) {
    if (!is_finite(magnitude[i])) return {float_of(0x7FC00000u), false};
    if (magnitude[i] > most) most = magnitude[i];
  }
  if (most < kSmallestScale) return {0.0f, false};
  return {most, true};
}

inline void encode_first(const float* m, const Block& b) {
  float magnitude[kBlock];
  for (int i = 0; i < kBlock; ++i) magnitude[i] = std::fabs(m[i]);
  const Scale scale = scale_of(magnitude);
  const float inverse_most = scale.coded ? 1.0f / scale.most : 0.0f, units = inverse_most * kFirstUnits;
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t word = b.random.multiplier * static_cast<uint32_t>(i) + b.random.offset;
    const float f = std::fma(m[i] * units, reciprocal(std::fma(magnitude[i], inverse_most, 1.0f)), kFirstMagic);
    b.first[i] = scale.coded ? static_cast<int8_t>((bits_of(f) + ((word >> 2) & 0x3FFFu)) >> 14) : 0;
  }
  *b.first_scale = scale.most;
}

inline void encode_second(const float* s, const Coefficients& c, const Block& b) {
  const Scale scale = scale_of(s);
  const float ratio = scale.coded ? 255.0f / scale.most : 0.0f;
  for (int i = 0; i < kBlock; ++i) {
    const float f = std::fma(s[i], ratio, kSecondMagic);
    b.second[i] = scale.coded ? static_cast<uint8_t>(bits_of(f > kSecondLowest ? f : kSecondLowest)) : 0;
  }
  *b.second_scale = is_finite(scale.most) ? scale.most * c.inverse_k : scale.most;
}

template <bool kNarrow>
void update_block(const Block& b, const Coefficients& c) {
  float m[kBlock], s[kBlock];
  const float first_unit = *b.first_scale * c.first_decay, second_unit = *b.second_scale * c.second_decay;
  for (int i = 0; i < kBlock; ++i) {
    const float g = kNarrow ? bf16(static_cast<const uint16_t*>(b.grad)[i]) : static_cast<const float*>(b.grad)[i];
    const float code = b.first[i];
    const float companded = code * reciprocal(std::fma(-1.0f / 127.0f, std::fabs(code), 2.0f));
    m[i] = std::fma(companded, first_unit, g * c.first_gain);
    const float a = static_cast<float>(b.second[i]) * second_unit, h = g * c.second_gain;
    s[i] = std::sqrt(std::fma(a, a, h * h));
    const float u = m[i] * inverse(s[i] + c.epsilon);
    if constexpr (kNarrow) {
      uint16_t& weight = static_cast<uint16_t*>(b.weight)[i];
      const float x = std::fma(c.step_size, u, master_of(weight, b.correction[i]) * b.decay);
      store_bf16(x, (b.random.multiplier * static_cast<uint32_t>(i) + b.random.offset) >> 24, weight, b.correction[i]);
    } else {
      float& weight = static_cast<float*>(b.weight)[i];
      const float x = std::fma(c.step_size, u, weight * b.decay);
      weight = std::isnan(x) ? float_of(0x7FC00000u) : x;
    }
  }
  encode_first(m, b);
  encode_second(s, c, b);
}

}  // namespace lazysched::portable
