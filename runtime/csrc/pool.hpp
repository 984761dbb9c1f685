// A thread pool for updates: jobs are cut into chunks, served in order, and each chunk can be waited for.
#pragma once
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tensor.hpp"

namespace lazysched {

struct Chunk {
  int32_t tensor;
  int64_t begin, end;  // blocks
};

// One update of some tensors. Chunks are begun in order; `num_ready` counts those of the front that are all done.
struct Job {
  std::vector<Tensor> tensors;
  Coefficients coefficients;
  UpdateRange update;
  std::vector<Chunk> chunks;
  std::vector<char> done;
  size_t next = 0, num_ready = 0;

  Job(const Tensor* first, int count, const Coefficients& coefficients, UpdateRange update, int64_t chunk_blocks);
  bool finished() const { return num_ready == chunks.size(); }
};

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();

  void start(const std::shared_ptr<Job>& job);
  // Waits until the first `num_chunks` chunks are done.
  void wait(Job& job, size_t num_chunks);

 private:
  void work();
  void stop();

  std::mutex mutex_;
  std::condition_variable has_work_, progress_;
  std::deque<std::shared_ptr<Job>> jobs_;  // those with chunks not begun
  std::vector<std::thread> threads_;
  bool stopping_ = false;
};

}  // namespace lazysched
