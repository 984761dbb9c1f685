// 16 lanes as two AVX2 registers. Elements stand in the order that unpacking bytes and words leaves them in, 0-3 and
// 8-11 in the first register, 4-7 and 12-15 in the second, so that packing them again needs no permutation.

constexpr int kRegisters = 2, kLanes = 8 * kRegisters;
constexpr float kInt8Unit = 0x1p-24f;  // load_int8 leaves codes at the top of their words
constexpr int64_t kBlocksAhead = 4;

struct F {
  __m256 v[kRegisters];
};
struct I {
  __m256i v[kRegisters];
};

#define LAZYSCHED_EACH(type, expression)                         \
  type result;                                                   \
  for (int k = 0; k < kRegisters; ++k) result.v[k] = expression; \
  return result

LAZYSCHED_INLINE F set(float x) { LAZYSCHED_EACH(F, _mm256_set1_ps(x)); }
LAZYSCHED_INLINE I set_bits(uint32_t x) { LAZYSCHED_EACH(I, _mm256_set1_epi32(static_cast<int>(x))); }
LAZYSCHED_INLINE I as_bits(F a) { LAZYSCHED_EACH(I, _mm256_castps_si256(a.v[k])); }
LAZYSCHED_INLINE F as_float(I a) { LAZYSCHED_EACH(F, _mm256_castsi256_ps(a.v[k])); }
LAZYSCHED_INLINE F add(F a, F b) { LAZYSCHED_EACH(F, _mm256_add_ps(a.v[k], b.v[k])); }
LAZYSCHED_INLINE F mul(F a, F b) { LAZYSCHED_EACH(F, _mm256_mul_ps(a.v[k], b.v[k])); }
LAZYSCHED_INLINE F fma(F a, F b, F c) { LAZYSCHED_EACH(F, _mm256_fmadd_ps(a.v[k], b.v[k], c.v[k])); }
LAZYSCHED_INLINE F fnma(F a, F b, F c) { LAZYSCHED_EACH(F, _mm256_fnmadd_ps(a.v[k], b.v[k], c.v[k])); }
LAZYSCHED_INLINE F max(F a, F b) { LAZYSCHED_EACH(F, _mm256_max_ps(a.v[k], b.v[k])); }
LAZYSCHED_INLINE F square_root(F a) { LAZYSCHED_EACH(F, _mm256_sqrt_ps(a.v[k])); }
LAZYSCHED_INLINE F abs(F a) { LAZYSCHED_EACH(F, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v[k])); }
LAZYSCHED_INLINE I add(I a, I b) { LAZYSCHED_EACH(I, _mm256_add_epi32(a.v[k], b.v[k])); }
LAZYSCHED_INLINE I sub(I a, I b) { LAZYSCHED_EACH(I, _mm256_sub_epi32(a.v[k], b.v[k])); }
LAZYSCHED_INLINE I bit_and(I a, I b) { LAZYSCHED_EACH(I, _mm256_and_si256(a.v[k], b.v[k])); }
template <int kCount>
LAZYSCHED_INLINE I shift_right(I a) {
  LAZYSCHED_EACH(I, _mm256_srli_epi32(a.v[k], kCount));
}
template <int kCount>
LAZYSCHED_INLINE I shift_left(I a) {
  LAZYSCHED_EACH(I, _mm256_slli_epi32(a.v[k], kCount));
}
LAZYSCHED_INLINE float max_of(F a) {
  alignas(32) float lanes[kLanes];
  for (int k = 0; k < kRegisters; ++k) _mm256_store_ps(lanes + 8 * k, a.v[k]);
  float most = lanes[0];
  for (float lane : lanes) most = lane > most ? lane : most;
  return most;
}
LAZYSCHED_INLINE float sum_of(F a) {
  alignas(32) float lanes[kLanes];
  for (int k = 0; k < kRegisters; ++k) _mm256_store_ps(lanes + 8 * k, a.v[k]);
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  return sum;
}

LAZYSCHED_INLINE F load(const float* p) { LAZYSCHED_EACH(F, _mm256_loadu_ps(p + 8 * k)); }
LAZYSCHED_INLINE void store(float* p, F a) {
  for (int k = 0; k < kRegisters; ++k) _mm256_storeu_ps(p + 8 * k, a.v[k]);
}
LAZYSCHED_INLINE F load_fp32(const float* p) {
  const __m256 low = _mm256_loadu_ps(p), high = _mm256_loadu_ps(p + 8);
  return {{_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)}};
}
LAZYSCHED_INLINE void store_fp32(float* p, F a) {
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(a.v[0], a.v[1], 0x20));
  _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(a.v[0], a.v[1], 0x31));
}
LAZYSCHED_INLINE __m256i load_16_words(const uint16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
LAZYSCHED_INLINE __m128i load_16_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
// Words of `high` above words of `low`.
LAZYSCHED_INLINE F joined(__m256i low, __m256i high) {
  return {{_mm256_castsi256_ps(_mm256_unpacklo_epi16(low, high)),
           _mm256_castsi256_ps(_mm256_unpackhi_epi16(low, high))}};
}
LAZYSCHED_INLINE F load_bf16(const uint16_t* p) { return joined(_mm256_setzero_si256(), load_16_words(p)); }
// Bytes 0-3 and 8-11, and bytes 4-7 and 12-15, each at place `kPlace` of a word of 32 bits.
template <int kPlace>
LAZYSCHED_INLINE I spread(const void* p) {
  const __m256i bytes = _mm256_broadcastsi128_si256(load_16_bytes(p));
  const __m256i source = _mm256_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11);  // the other bytes of a word: none
  const __m256i none = _mm256_set1_epi32(static_cast<int>(0x80808080u & ~(0xFFu << (8 * kPlace))));
  const __m256i first = _mm256_or_si256(_mm256_slli_epi32(source, 8 * kPlace), none);
  const __m256i second = _mm256_add_epi32(first, _mm256_set1_epi32(4 << (8 * kPlace)));
  return {{_mm256_shuffle_epi8(bytes, first), _mm256_shuffle_epi8(bytes, second)}};
}
LAZYSCHED_INLINE F load_int8(const int8_t* p) {
  const I code = spread<3>(p);
  LAZYSCHED_EACH(F, _mm256_cvtepi32_ps(code.v[k]));
}
LAZYSCHED_INLINE F load_uint8(const uint8_t* p) {
  const I code = spread<0>(p);
  LAZYSCHED_EACH(F, _mm256_cvtepi32_ps(code.v[k]));
}
LAZYSCHED_INLINE F load_master(const uint16_t* weight, const int8_t* correction) {
  const __m256i low = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_16_bytes(correction)), 8);
  const __m256i borrow = _mm256_srai_epi16(low, 15);  // -1 beside a negative correction
  return joined(low, _mm256_add_epi16(load_16_words(weight), borrow));
}
// Codes of the first moment stand in bits 16-23, those of the second in bits 0-7.
LAZYSCHED_INLINE void store_codes(int8_t* first, uint8_t* second, I first_bits, I second_bits) {
  const __m256i gather = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(2, 6, 10, 14, 0, 4, 8, 12, -128, -128, -128, -128, -128, -128, -128, -128));
  __m256i both[kRegisters];
  for (int k = 0; k < kRegisters; ++k)
    both[k] = _mm256_shuffle_epi8(_mm256_blend_epi16(second_bits.v[k], first_bits.v[k], 0xAA), gather);
  const __m256i lanes = _mm256_unpacklo_epi32(both[0], both[1]);
  const __m256i ordered = _mm256_permute4x64_epi64(lanes, 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(first), _mm256_castsi256_si128(ordered));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(second), _mm256_extracti128_si256(ordered, 1));
}
LAZYSCHED_INLINE void store_master(uint16_t* weight, int8_t* correction, I bits) {
  const __m256i gather = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, 1, 5, 9, 13, -128, -128, -128, -128));
  __m256i both[kRegisters];
  for (int k = 0; k < kRegisters; ++k)
    both[k] = _mm256_shuffle_epi8(_mm256_add_epi32(bits.v[k], _mm256_set1_epi32(0x8000)), gather);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight), _mm256_unpacklo_epi64(both[0], both[1]));
  const __m256i parts = _mm256_unpackhi_epi64(both[0], both[1]);
  const __m128i bytes = _mm256_castsi256_si128(
      _mm256_permutevar8x32_epi32(parts, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6)));
  // Rounding the weight added 0x8000, which flips the upper bit of the correction.
  _mm_storeu_si128(reinterpret_cast<__m128i*>(correction), _mm_xor_si128(bytes, _mm_set1_epi8(-128)));
}
LAZYSCHED_INLINE I words(uint32_t multiplier, uint32_t offset) {
  const __m256i element = _mm256_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11);
  LAZYSCHED_EACH(I, _mm256_add_epi32(_mm256_mullo_epi32(_mm256_add_epi32(element, _mm256_set1_epi32(4 * k)),
                                                        _mm256_set1_epi32(static_cast<int>(multiplier))),
                                     _mm256_set1_epi32(static_cast<int>(offset))));
}
#undef LAZYSCHED_EACH
