// The update of one block, several lanes at a time. Included once per variant, inside its namespace and its target options,
// after kLanes, types F (floats) and I (uint32) of so many lanes, the operations on them, kInt8Unit, a power of two that
// load_int8's result still has to be multiplied by, and kBlocksAhead, the blocks by which memory is asked for early, are
// defined there.

LAZYSCHED_INLINE F reciprocal(F d) {
  const F y = fma(fma(set(kReciprocal[2]), d, set(kReciprocal[1])), d, set(kReciprocal[0]));
  return mul(y, fnma(d, y, set(kReciprocalTwo)));
}

LAZYSCHED_INLINE F inverse(F d) {
  const F y = as_float(sub(set_bits(kInverseSeed), as_bits(d)));
  const F e = fnma(d, y, set(1.0f));
  return fma(y, fma(e, e, e), y);
}

// Asks for what a later block reads at the same place. Requests in every iteration are more than there are lines, but
// choosing among them gained nothing.
template <int kBytes>
LAZYSCHED_INLINE void fetch_ahead(const void* array, int i) {
  if (kBlocksAhead > 0) __builtin_prefetch(static_cast<const char*>(array) + (kBlocksAhead * kBlock + i) * kBytes);
}

// Passes over a block hand on through the innermost cache. Three short ones run faster than one: the chain of dependent
// operations of an element is long, and a processor sees more elements at once when each takes fewer instructions.
struct Scratch {
  alignas(64) float m[kBlock], s[kBlock], x[kBlock];
};

struct Largest {
  float first, second;
};

// The unit that takes roots is another than the one that multiplies, and this pass leaves it time.
template <bool kNarrow>
LAZYSCHED_INLINE Largest moments(const Block& b, const Coefficients& c, Scratch& scratch) {
  const F first_unit = set(*b.first_scale * c.first_decay * kInt8Unit), second_unit = set(*b.second_scale * c.second_decay);
  const F first_gain = set(c.first_gain), second_gain = set(c.second_gain);
  F most_first = set(0.0f), most_second = set(0.0f);
  for (int i = 0; i < kBlock; i += kLanes) {
    fetch_ahead<kNarrow ? 2 : 4>(b.grad, i);
    fetch_ahead<1>(b.first, i);
    fetch_ahead<1>(b.second, i);
    const F g = kNarrow ? load_bf16(static_cast<const uint16_t*>(b.grad) + i)
                        : load_fp32(static_cast<const float*>(b.grad) + i);
    const F code = load_int8(b.first + i);
    const F companded = mul(code, reciprocal(fma(set(-1.0f / 127.0f * kInt8Unit), abs(code), set(2.0f))));
    const F m = fma(companded, first_unit, mul(g, first_gain));
    const F a = mul(load_uint8(b.second + i), second_unit), h = mul(g, second_gain);
    const F s = square_root(fma(a, a, mul(h, h)));
    most_first = max(most_first, abs(m));
    most_second = max(most_second, s);
    store(scratch.m + i, m);
    store(scratch.s + i, s);
  }
  return {max_of(most_first), max_of(most_second)};
}

// Whether every master is finite, and every moment with them.
template <bool kNarrow>
LAZYSCHED_INLINE bool step(const Block& b, const Coefficients& c, Scratch& scratch) {
  const F epsilon = set(c.epsilon), step_size = set(c.step_size), decay = set(b.decay);
  F zero_if_finite = set(0.0f);
  for (int i = 0; i < kBlock; i += kLanes) {
    fetch_ahead<kNarrow ? 2 : 4>(b.weight, i);
    if (kNarrow) fetch_ahead<1>(b.correction, i);
    const F u = mul(load(scratch.m + i), inverse(add(load(scratch.s + i), epsilon)));
    const F master = kNarrow ? load_master(static_cast<const uint16_t*>(b.weight) + i, b.correction + i)
                             : load_fp32(static_cast<const float*>(b.weight) + i);
    const F x = fma(step_size, u, mul(master, decay));
    zero_if_finite = fma(x, set(0.0f), zero_if_finite);
    store(scratch.x + i, x);
  }
  return sum_of(zero_if_finite) == 0.0f;
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
  const Largest most = moments<kNarrow>(b, c, scratch);
  if (!step<kNarrow>(b, c, scratch)) return portable::update_block<kNarrow>(b, c);
  const float first = most.first < kSmallestScale ? 0.0f : most.first;
  const float second = most.second < kSmallestScale ? 0.0f : most.second;
  encode<kNarrow>(b, scratch, first, second);
  *b.first_scale = first;
  *b.second_scale = second * c.inverse_k;
}
