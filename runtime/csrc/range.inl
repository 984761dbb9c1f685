// Walks a tensor block by block. Included once per variant, inside its namespace and its target options, after
// `update_full_block<narrow>` is defined there.

template <bool kNarrow>
static void update_tail(const Coefficients& c, const Block& whole, int64_t count) {
  using Element = std::conditional_t<kNarrow, uint16_t, float>;
  alignas(64) Element weight[kBlock] = {}, grad[kBlock] = {};
  alignas(64) int8_t correction[kBlock] = {}, first[kBlock] = {};
  alignas(64) uint8_t second[kBlock] = {};
  std::memcpy(weight, whole.weight, count * sizeof(Element));
  std::memcpy(grad, whole.grad, count * sizeof(Element));
  std::memcpy(first, whole.first, count);
  std::memcpy(second, whole.second, count);
  if (kNarrow) std::memcpy(correction, whole.correction, count);
  Block padded = whole;
  padded.weight = weight, padded.grad = grad, padded.correction = correction;
  padded.first = first, padded.second = second;
  update_full_block<kNarrow>(padded, c);
  std::memcpy(whole.weight, weight, count * sizeof(Element));
  std::memcpy(whole.first, first, count);
  std::memcpy(whole.second, second, count);
  if (kNarrow) std::memcpy(whole.correction, correction, count);
}

template <bool kNarrow>
static void update_blocks(const Tensor& t, const Coefficients& c, int64_t begin, int64_t end) {
  using Element = std::conditional_t<kNarrow, uint16_t, float>;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t at = block * kBlock, count = t.numel - at < kBlock ? t.numel - at : kBlock;
    const Block b = {static_cast<Element*>(t.weight) + at,
                     static_cast<const Element*>(t.grad) + at,
                     kNarrow ? static_cast<int8_t*>(t.correction) + at : nullptr,
                     static_cast<int8_t*>(t.first) + at,
                     static_cast<uint8_t*>(t.second) + at,
                     t.first_scale + block,
                     t.second_scale + block,
                     t.decays ? c.decay : 1.0f,
                     random_of(t, c, block)};
    if (count == kBlock)
      update_full_block<kNarrow>(b, c);
    else
      update_tail<kNarrow>(c, b, count);
  }
}

template <bool kNarrow>
static void update_fp32(const Tensor& t, const Coefficients& c, int64_t begin, int64_t end) {
  const int64_t start = begin * kBlock, stop = end * kBlock < t.numel ? end * kBlock : t.numel;
  const float decay = t.decays ? c.decay : 1.0f;
  float* master = static_cast<float*>(kNarrow ? t.correction : t.weight);
  float *first = static_cast<float*>(t.first), *second = static_cast<float*>(t.second);
  for (int64_t i = start; i < stop; ++i) {
    const float g = kNarrow ? portable::bf16(static_cast<const uint16_t*>(t.grad)[i]) : static_cast<const float*>(t.grad)[i];
    const float h = g * c.second_gain_fp32;
    first[i] = std::fma(first[i], c.beta1, g * c.first_gain);
    second[i] = std::fma(second[i], c.beta2, h * h);
    const float u = first[i] / std::fma(std::sqrt(second[i]), c.k, c.epsilon);
    master[i] = std::fma(c.step_size, u, master[i] * decay);
  }
  if (!kNarrow) return;
  for (int64_t i = start; i < stop; ++i) {
    const uint32_t bits = portable::bits_of(master[i]);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    static_cast<uint16_t*>(t.weight)[i] = static_cast<uint16_t>(std::isnan(master[i]) ? 0x7FC0u : rounded);
  }
}

void update_range(const Tensor& t, const Coefficients& c, int64_t begin, int64_t end) {
  switch (t.format) {
    case kBf16Blocks: return update_blocks<true>(t, c, begin, end);
    case kFp32Blocks: return update_blocks<false>(t, c, begin, end);
    case kBf16Fp32: return update_fp32<true>(t, c, begin, end);
    default: return update_fp32<false>(t, c, begin, end);
  }
}
