// 16 lanes as four NEON registers.

constexpr int kLanes = 16;
constexpr float kInt8Unit = 1.0f;
constexpr int64_t kBlocksAhead = 0;  // not measured

struct F {
  float32x4_t v[4];
};
struct I {
  uint32x4_t v[4];
};

#define LAZYSCHED_EACH(type, expression)       \
  type result;                                 \
  for (int k = 0; k < 4; ++k) result.v[k] = expression; \
  return result

LAZYSCHED_INLINE F set(float x) { LAZYSCHED_EACH(F, vdupq_n_f32(x)); }
LAZYSCHED_INLINE I set_bits(uint32_t x) { LAZYSCHED_EACH(I, vdupq_n_u32(x)); }
LAZYSCHED_INLINE I as_bits(F a) { LAZYSCHED_EACH(I, vreinterpretq_u32_f32(a.v[k])); }
LAZYSCHED_INLINE F as_float(I a) { LAZYSCHED_EACH(F, vreinterpretq_f32_u32(a.v[k])); }
LAZYSCHED_INLINE F add(F a, F b) { LAZYSCHED_EACH(F, vaddq_f32(a.v[k], b.v[k])); }
LAZYSCHED_INLINE F mul(F a, F b) { LAZYSCHED_EACH(F, vmulq_f32(a.v[k], b.v[k])); }
LAZYSCHED_INLINE F fma(F a, F b, F c) { LAZYSCHED_EACH(F, vfmaq_f32(c.v[k], a.v[k], b.v[k])); }
LAZYSCHED_INLINE F fnma(F a, F b, F c) { LAZYSCHED_EACH(F, vfmsq_f32(c.v[k], a.v[k], b.v[k])); }
LAZYSCHED_INLINE F max(F a, F b) { LAZYSCHED_EACH(F, vmaxq_f32(a.v[k], b.v[k])); }
LAZYSCHED_INLINE F square_root(F a) { LAZYSCHED_EACH(F, vsqrtq_f32(a.v[k])); }
LAZYSCHED_INLINE F abs(F a) { LAZYSCHED_EACH(F, vabsq_f32(a.v[k])); }
LAZYSCHED_INLINE I add(I a, I b) { LAZYSCHED_EACH(I, vaddq_u32(a.v[k], b.v[k])); }
LAZYSCHED_INLINE I sub(I a, I b) { LAZYSCHED_EACH(I, vsubq_u32(a.v[k], b.v[k])); }
LAZYSCHED_INLINE I bit_and(I a, I b) { LAZYSCHED_EACH(I, vandq_u32(a.v[k], b.v[k])); }
template <int kCount>
LAZYSCHED_INLINE I shift_right(I a) {
  LAZYSCHED_EACH(I, vshrq_n_u32(a.v[k], kCount));
}
template <int kCount>
LAZYSCHED_INLINE I shift_left(I a) {
  LAZYSCHED_EACH(I, vshlq_n_u32(a.v[k], kCount));
}
LAZYSCHED_INLINE float max_of(F a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
LAZYSCHED_INLINE float sum_of(F a) {
  return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3])));
}

LAZYSCHED_INLINE F load(const float* p) { LAZYSCHED_EACH(F, vld1q_f32(p + 4 * k)); }
LAZYSCHED_INLINE void store(float* p, F a) {
  for (int k = 0; k < 4; ++k) vst1q_f32(p + 4 * k, a.v[k]);
}
LAZYSCHED_INLINE I load_halves(const uint16_t* p) { LAZYSCHED_EACH(I, vshll_n_u16(vld1_u16(p + 4 * k), 16)); }
LAZYSCHED_INLINE F load_bf16(const uint16_t* p) { return as_float(load_halves(p)); }
struct Signed {
  int32x4_t v[4];
};
LAZYSCHED_INLINE Signed load_signed(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
           vmovl_s16(vget_high_s16(high))}};
}
LAZYSCHED_INLINE F load_int8(const int8_t* p) {
  const Signed code = load_signed(p);
  LAZYSCHED_EACH(F, vcvtq_f32_s32(code.v[k]));
}
LAZYSCHED_INLINE F load_uint8(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}
LAZYSCHED_INLINE F load_master(const uint16_t* weight, const int8_t* correction) {
  const Signed low = load_signed(correction);
  const I high = load_halves(weight);
  LAZYSCHED_EACH(F, vreinterpretq_f32_u32(vaddq_u32(high.v[k], vreinterpretq_u32_s32(vshlq_n_s32(low.v[k], 8)))));
}
LAZYSCHED_INLINE F load_fp32(const float* p) { return load(p); }
LAZYSCHED_INLINE void store_fp32(float* p, F a) { store(p, a); }
LAZYSCHED_INLINE void store_bytes(void* p, I a) {
  const uint16x8_t low = vcombine_u16(vmovn_u32(a.v[0]), vmovn_u32(a.v[1]));
  const uint16x8_t high = vcombine_u16(vmovn_u32(a.v[2]), vmovn_u32(a.v[3]));
  vst1q_u8(static_cast<uint8_t*>(p), vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
}
LAZYSCHED_INLINE void store_codes(int8_t* first, uint8_t* second, I first_bits, I second_bits) {
  store_bytes(first, shift_right<16>(first_bits));
  store_bytes(second, second_bits);
}
LAZYSCHED_INLINE void store_master(uint16_t* weight, int8_t* correction, I bits) {
  const I rounded = add(bits, set_bits(0x8000u));
  for (int k = 0; k < 4; ++k) vst1_u16(weight + 4 * k, vshrn_n_u32(rounded.v[k], 16));
  store_bytes(correction, shift_right<8>(bits));
}
LAZYSCHED_INLINE I words(uint32_t multiplier, uint32_t offset) {
  const uint32_t start[4] = {0, 1, 2, 3};
  const uint32x4_t element = vld1q_u32(start);
  LAZYSCHED_EACH(I, vmlaq_u32(vdupq_n_u32(offset), vaddq_u32(element, vdupq_n_u32(4 * k)), vdupq_n_u32(multiplier)));
}
#undef LAZYSCHED_EACH
