#include "pool.hpp"

#include <algorithm>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace lazysched {
namespace {

// A thread inherits rounding and the flushing of subnormals from whoever made it; results must not depend on that.
void use_ieee_arithmetic() {
#if defined(__x86_64__)
  _mm_setcsr(0x1F80);
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
#endif
}

}  // namespace

Job::Job(const Tensor* first, int count, const Coefficients& coefficients, UpdateRange update, int64_t chunk_blocks)
    : tensors(first, first + count), coefficients(coefficients), update(update) {
  if (coefficients.skip != 0.0f) return;
  for (int32_t index = 0; index < count; ++index) {
    const int64_t blocks = (tensors[index].numel + kBlock - 1) / kBlock;
    for (int64_t begin = 0; begin < blocks; begin += chunk_blocks)
      chunks.push_back({index, begin, std::min(begin + chunk_blocks, blocks)});
  }
  done.resize(chunks.size());
}

Pool::Pool(int num_threads) {
  try {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (...) {
    stop();  // threads that run must be joined before their objects go
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  has_work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::start(const std::shared_ptr<Job>& job) {
  if (job->finished()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(job);
  }
  has_work_.notify_all();
}

void Pool::wait(Job& job, size_t num_chunks) {
  std::unique_lock<std::mutex> lock(mutex_);
  progress_.wait(lock, [&] { return job.num_ready >= std::min(num_chunks, job.chunks.size()); });
}

void Pool::work() {
  use_ieee_arithmetic();
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    has_work_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const std::shared_ptr<Job> job = jobs_.front();
    const size_t index = job->next++;
    if (job->next == job->chunks.size()) jobs_.pop_front();
    lock.unlock();
    const Chunk& chunk = job->chunks[index];
    job->update(job->tensors[chunk.tensor], job->coefficients, chunk.begin, chunk.end);
    lock.lock();
    job->done[index] = 1;
    const size_t before = job->num_ready;
    while (job->num_ready < job->chunks.size() && job->done[job->num_ready]) ++job->num_ready;
    if (job->num_ready != before) progress_.notify_all();
  }
}

}  // namespace lazysched
