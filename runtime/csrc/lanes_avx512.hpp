// 16 lanes as one AVX-512 register.

constexpr int kLanes = 16;
constexpr float kInt8Unit = 1.0f;
constexpr int64_t kBlocksAhead = 0;  // not measured

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};

LAZYSCHED_INLINE F set(float x) { return {_mm512_set1_ps(x)}; }
LAZYSCHED_INLINE I set_bits(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
LAZYSCHED_INLINE I as_bits(F a) { return {_mm512_castps_si512(a.v)}; }
LAZYSCHED_INLINE F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
LAZYSCHED_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
LAZYSCHED_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
LAZYSCHED_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
LAZYSCHED_INLINE F fnma(F a, F b, F c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
LAZYSCHED_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
LAZYSCHED_INLINE F square_root(F a) { return {_mm512_sqrt_ps(a.v)}; }
LAZYSCHED_INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
LAZYSCHED_INLINE I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
LAZYSCHED_INLINE I sub(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
LAZYSCHED_INLINE I bit_and(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int kCount>
LAZYSCHED_INLINE I shift_right(I a) {
  return {_mm512_srli_epi32(a.v, kCount)};
}
template <int kCount>
LAZYSCHED_INLINE I shift_left(I a) {
  return {_mm512_slli_epi32(a.v, kCount)};
}
LAZYSCHED_INLINE float max_of(F a) { return _mm512_reduce_max_ps(a.v); }
LAZYSCHED_INLINE float sum_of(F a) { return _mm512_reduce_add_ps(a.v); }

LAZYSCHED_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
LAZYSCHED_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
LAZYSCHED_INLINE __m512i load_halves(const uint16_t* p) {
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
}
LAZYSCHED_INLINE F load_bf16(const uint16_t* p) { return {_mm512_castsi512_ps(load_halves(p))}; }
LAZYSCHED_INLINE __m512i load_signed(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
LAZYSCHED_INLINE F load_int8(const int8_t* p) { return {_mm512_cvtepi32_ps(load_signed(p))}; }
LAZYSCHED_INLINE F load_uint8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
LAZYSCHED_INLINE F load_master(const uint16_t* weight, const int8_t* correction) {
  const __m512i low = _mm512_slli_epi32(load_signed(correction), 8);
  return {_mm512_castsi512_ps(_mm512_add_epi32(load_halves(weight), low))};
}
LAZYSCHED_INLINE F load_fp32(const float* p) { return load(p); }
LAZYSCHED_INLINE void store_fp32(float* p, F a) { store(p, a); }
LAZYSCHED_INLINE void store_bytes(void* p, I a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
LAZYSCHED_INLINE void store_codes(int8_t* first, uint8_t* second, I first_bits, I second_bits) {
  store_bytes(first, shift_right<16>(first_bits));
  store_bytes(second, second_bits);
}
LAZYSCHED_INLINE void store_master(uint16_t* weight, int8_t* correction, I bits) {
  const I rounded = shift_right<16>(add(bits, set_bits(0x8000u)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight), _mm512_cvtepi32_epi16(rounded.v));
  store_bytes(correction, shift_right<8>(bits));
}
LAZYSCHED_INLINE I words(uint32_t multiplier, uint32_t offset) {
  const __m512i element = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return {_mm512_add_epi32(_mm512_mullo_epi32(element, set_bits(multiplier).v), set_bits(offset).v)};
}
