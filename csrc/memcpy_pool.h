// Host threads that copy bytes. Standard library only.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace gpuprefetch {

// Threads of our own, so that copying neither takes nor changes torch's intra-op threads, which belong to the trainer.
// They sleep when there is nothing to copy. All members may be called from any thread.
class MemcpyPool {
 public:
  // Rows that lie one behind the other at `to`, and `stride` bytes apart at `from`. nullptr: zeros.
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t row_bytes;
    std::size_t rows = 1;
    std::size_t stride = 0;
  };

  // Copies done one after another by one thread. The caller owns it and keeps it where it is between start() and the
  // return of finish() or cancel().
  class Job {
   public:
    std::vector<Copy> copies;

   private:
    friend class MemcpyPool;
    enum class State { kIdle, kQueued, kRunning, kDone };
    State state = State::kIdle;  // guarded by the pool's mutex
  };

  // Starts up to `threads` threads; where the system refuses, fewer. With none, finish() does the copying.
  explicit MemcpyPool(int threads);
  MemcpyPool(const MemcpyPool&) = delete;  // threads refer to it
  MemcpyPool& operator=(const MemcpyPool&) = delete;
  ~MemcpyPool();

  // Threads that were started.
  std::size_t size() const { return size_; }

  // Queues the job. Jobs begin in the order in which they were started.
  void start(Job& job);

  // Returns when the job's bytes have been copied. A job that no thread has begun, or that was never started, is done
  // by the caller, so a pool without threads, or one that has been shut down, still copies.
  void finish(Job& job);

  // Whether finish() would return at once, with nothing left to do.
  bool is_done(const Job& job);

  // Returns when no thread touches the job any more. It may or may not have run.
  void cancel(Job& job) noexcept;

  // Joins the threads after their current jobs. A second call has nothing to join and returns at once.
  void shutdown() noexcept;

 private:
  void run();
  bool take_back(Job& job);

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<Job*> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  std::size_t size_ = 0;
};

}  // namespace gpuprefetch
