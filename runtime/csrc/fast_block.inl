// The update of one block, several lanes at a time. Included once per variant, inside its namespace and its target options,
// after kLanes, types F (floats) and I (uint32) of so many lanes, the operations on them and kInt8Unit,
// a power of two that load_int8's result still has to be multiplied by, are defined there.

LAZYSCHED_INLINE F reciprocal(F d) {
  const F y = fma(fma(set(kReciprocal[2]), d, set(kReciprocal[1])), d, set(kReciprocal[0]));
  return mul(y, fnma(d, y, set(kReciprocalTwo)));
}

LAZYSCHED_INLINE F square_root(F v) {
  const F y = as_float(sub(set_bits(kRootSeed), shift_right<1>(as_bits(v))));
  const F t = mul(v, y), e = mul(t, y);
  return mul(t, fma(fma(fma(set(kRoot[3]), e, set(kRoot[2])), e, set(kRoot[1])), e, set(kRoot[0])));
}

LAZYSCHED_INLINE F inverse(F d) {
  const F y = as_float(sub(set_bits(kInverseSeed), as_bits(d)));
  const F e = fnma(d, y, set(1.0f));
  return fma(y, fma(e, e, e), y);
}

// Passes over a block hand on through the innermost cache. Three short ones run faster than one: the chain of dependent
// operations of an element is long, and a processor sees more elements at once when each takes fewer instructions.
struct Scratch {
  alignas(64) float m[kBlock], s[kBlock], x[kBlock];  // s holds v between the first two passes
};

struct Roots {
  float most;
  bool finite;  // and every master with them
};

template <bool kNarrow>
LAZYSCHED_INLINE float moments(const Block& b, const Coefficients& c, Scratch& scratch) {
  const F first_unit = set(*b.first_scale * c.first_decay * kInt8Unit), second_unit = set(*b.second_scale * c.second_decay);
  const F first_gain = set(c.first_gain), second_gain = set(c.second_gain);
  F most = set(0.0f);
  for (int i = 0; i < kBlock; i += kLanes) {
    const F g = kNarrow ? load_bf16(static_cast<const uint16_t*>(b.grad) + i)
                        : load_fp32(static_cast<const float*>(b.grad) + i);
    const F code = load_int8(b.first + i);
    const F companded = mul(code, reciprocal(fma(set(-1.0f / 127.0f * kInt8Unit), abs(code), set(2.0f))));
    const F m = fma(companded, first_unit, mul(g, first_gain));
    const F a = mul(load_uint8(b.second + i), second_unit), h = mul(g, second_gain);
    most = max(most, abs(m));
    store(scratch.m + i, m);
    store(scratch.s + i, fma(a, a, mul(h, h)));
  }
  return max_of(most);
}

template <bool kNarrow>
LAZYSCHED_INLINE Roots step(const Block& b, const Coefficients& c, Scratch& scratch) {
  const F epsilon = set(c.epsilon), step_size = set(c.step_size), decay = set(b.decay);
  F most = set(0.0f), zero_if_finite = set(0.0f);
  for (int i = 0; i < kBlock; i += kLanes) {
    const F s = square_root(load(scratch.s + i));
    const F u = mul(load(scratch.m + i), inverse(add(s, epsilon)));
    const F master = kNarrow ? load_master(static_cast<const uint16_t*>(b.weight) + i, b.correction + i)
                             : load_fp32(static_cast<const float*>(b.weight) + i);
    const F x = fma(step_size, u, mul(master, decay));
    most = max(most, s);
    zero_if_finite = fma(x, set(0.0f), zero_if_finite);
    store(scratch.s + i, s);
    store(scratch.x + i, x);
  }
  const float sum = sum_of(zero_if_finite);
  return {max_of(most), sum == sum};
}

template <bool kNarrow>
LAZYSCHED_INLINE void encode(const Block& b, const Scratch& scratch, float most_first, float most_second) {
  const float inverse_first = most_first > 0.0f ? 1.0f / most_first : 0.0f;
  const F inverse_most = set(inverse_first), units = set(inverse_first * kFirstUnits);
  const F ratio = set(most_second > 0.0f ? 255.0f / most_second : 0.0f);
  const F lowest = set(most_second > 0.0f ? kSecondLowest : kSecondMagic);
  I word = words(b.random.multiplier, b.random.offset);
  const I next = set_bits(kLanes * b.random.multiplier);
  for (int i = 0; i < kBlock; i += kLanes) {
    const F m = load(scratch.m + i);
    const F f = fma(mul(m, units), reciprocal(fma(abs(m), inverse_most, set(1.0f))), set(kFirstMagic));
    const F h = max(fma(load(scratch.s + i), ratio, set(kSecondMagic)), lowest);
    store_codes(b.first + i, b.second + i, add(shift_left<2>(as_bits(f)), bit_and(word, set_bits(0xFFFCu))), as_bits(h));
    if (kNarrow)
      store_master(static_cast<uint16_t*>(b.weight) + i, b.correction + i,
                   add(as_bits(load(scratch.x + i)), shift_right<24>(word)));
    else
      store_fp32(static_cast<float*>(b.weight) + i, load(scratch.x + i));
    word = add(word, next);
  }
}

template <bool kNarrow>
static void update_full_block(const Block& b, const Coefficients& c) {
  Scratch scratch;
  const float most_first = moments<kNarrow>(b, c, scratch);
  const Roots roots = step<kNarrow>(b, c, scratch);
  if (!roots.finite) return portable::update_block<kNarrow>(b, c);
  const float first = most_first < kSmallestScale ? 0.0f : most_first;
  const float second = roots.most < kSmallestScale ? 0.0f : roots.most;
  encode<kNarrow>(b, scratch, first, second);
  *b.first_scale = first;
  *b.second_scale = second * c.inverse_k;
}
