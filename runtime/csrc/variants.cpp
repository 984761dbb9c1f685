#include "variants.hpp"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "portable.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LAZYSCHED_INLINE static inline __attribute__((always_inline))

namespace lazysched {
namespace portable_variant {
template <bool kNarrow>
static void update_full_block(const Block& b, const Coefficients& c) {
  portable::update_block<kNarrow>(b, c);
}
#include "range.inl"
}  // namespace portable_variant

// Functions between BEGIN and END are compiled for the named processor features and run only where those exist.
#if defined(__clang__)
#define LAZYSCHED_BEGIN(features) \
  _Pragma(LAZYSCHED_TEXT(clang attribute push(__attribute__((target(features))), apply_to = function)))
#define LAZYSCHED_END _Pragma("clang attribute pop")
#else
#define LAZYSCHED_BEGIN(features) _Pragma("GCC push_options") _Pragma(LAZYSCHED_TEXT(GCC target(features)))
#define LAZYSCHED_END _Pragma("GCC pop_options")
#endif
#define LAZYSCHED_TEXT(text) #text

#if defined(__x86_64__)
LAZYSCHED_BEGIN("avx2,fma")
namespace avx2 {
#include "lanes_avx2.hpp"
#include "fast_block.inl"
#include "range.inl"
}  // namespace avx2
LAZYSCHED_END

LAZYSCHED_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace avx512 {
#include "lanes_avx512.hpp"
#include "fast_block.inl"
#include "range.inl"
}  // namespace avx512
LAZYSCHED_END
#elif defined(__aarch64__)
namespace neon {
#include "lanes_neon.hpp"
#include "fast_block.inl"
#include "range.inl"
}  // namespace neon
#endif

UpdateRange update_range_of(int variant) {
  switch (variant) {
    case kPortable:
      return portable_variant::update_range;
#if defined(__x86_64__)
    case kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? avx2::update_range : nullptr;
    case kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
                 ? avx512::update_range
                 : nullptr;
#elif defined(__aarch64__)
    case kNeon:
      return neon::update_range;
#endif
    default:
      return nullptr;
  }
}

}  // namespace lazysched
