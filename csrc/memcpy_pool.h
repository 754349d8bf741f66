// Host threads that copy bytes. Standard library only.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "host_copy.h"

namespace gpuprefetch {

// Threads of our own, so that copying neither takes nor changes torch's intra-op threads, which belong to the trainer.
// They sleep when there is nothing to copy. All members may be called from any thread.
class MemcpyPool {
 public:
  // Parts that threads share out among themselves: each is done by one of them, one copy after another. The caller owns
  // the job and keeps it as it is between start() and the return of finish() or cancel().
  class Job {
   public:
    std::vector<std::vector<HostCopy>> parts;

   private:
    friend class MemcpyPool;
    bool is_done() const { return next >= parts.size() && running == 0; }
    // Guarded by the pool's mutex.
    std::size_t next = 0;  // the first part that nobody has begun
    std::size_t running = 0;
  };

  // Starts up to `threads` threads; where the system refuses, fewer. With none, finish() does the copying.
  explicit MemcpyPool(int threads);
  MemcpyPool(const MemcpyPool&) = delete;  // threads refer to it
  MemcpyPool& operator=(const MemcpyPool&) = delete;
  ~MemcpyPool();

  // Threads that were started.
  std::size_t size() const { return size_; }

  // Queues the job. Threads begin parts in their order, behind those of jobs that were started before.
  void start(Job& job);

  // Returns when the job's bytes have been copied. The caller does what no thread has begun, and all of a job that was
  // never started: so a pool without threads, or one that has been shut down, still copies.
  void finish(Job& job);

  // Whether finish() would return at once, with nothing left to do.
  bool is_done(const Job& job);

  // Returns when no thread touches the job any more. None, some of its first parts, or all have run.
  void cancel(Job& job) noexcept;

  // Joins the threads after their current parts. A second call has nothing to join and returns at once.
  void shutdown() noexcept;

 private:
  void run();
  void do_next_part(Job& job, std::unique_lock<std::mutex>& lock);
  void drop(const Job& job);

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<Job*> queue_;  // those with parts that nobody has begun
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  std::size_t size_ = 0;
};

}  // namespace gpuprefetch
