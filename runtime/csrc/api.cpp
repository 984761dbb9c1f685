// The C interface that runtime/kernels.py calls through ctypes. Nothing throws across it: null or -1 tells of failure.
#include <exception>

#include "pool.hpp"
#include "variants.hpp"

#define LAZYSCHED_API extern "C" __attribute__((visibility("default")))

using lazysched::Coefficients;
using lazysched::Job;
using lazysched::Pool;
using lazysched::Tensor;

static_assert(sizeof(Tensor) == 80 && sizeof(Coefficients) == 56, "mirrored in runtime/kernels.py");

namespace {
struct Handle {
  Pool* pool;
  std::shared_ptr<Job> job;
};
}  // namespace

// Changes with the layout of the structures or the meaning of the state.
LAZYSCHED_API int lazysched_interface() { return 1; }

// Whether `variant` runs on this processor.
LAZYSCHED_API int lazysched_has_variant(int variant) { return lazysched::update_range_of(variant) != nullptr; }

LAZYSCHED_API void* lazysched_pool_new(int num_threads) try {
  return new Pool(num_threads);
} catch (const std::exception&) {
  return nullptr;
}

LAZYSCHED_API void lazysched_pool_delete(void* pool) { delete static_cast<Pool*>(pool); }

// Begins an update and returns its handle; the caller keeps all arrays alive until it was waited for.
LAZYSCHED_API void* lazysched_start(void* pool, const Tensor* tensors, int count, const Coefficients* coefficients,
                                    int variant, int64_t chunk_blocks) try {
  auto job = std::make_shared<Job>(tensors, count, *coefficients, lazysched::update_range_of(variant), chunk_blocks);
  auto handle = new Handle{static_cast<Pool*>(pool), job};
  handle->pool->start(job);
  return handle;
} catch (const std::exception&) {
  return nullptr;
}

LAZYSCHED_API int64_t lazysched_num_chunks(const void* handle) {
  return static_cast<int64_t>(static_cast<const Handle*>(handle)->job->chunks.size());
}

// Waits until the first `num_chunks` chunks are done; a number beyond the last waits for all.
LAZYSCHED_API void lazysched_wait(void* handle, int64_t num_chunks) {
  auto* own = static_cast<Handle*>(handle);
  own->pool->wait(*own->job, static_cast<size_t>(num_chunks));
}

LAZYSCHED_API void lazysched_finish(void* handle) {
  lazysched_wait(handle, INT64_MAX);
  delete static_cast<Handle*>(handle);
}
