#include "memcpy_pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "platform.h"

namespace gpuprefetch {
namespace {

using Clock = std::chrono::steady_clock;

// As long as a part takes, or to fall asleep and be woken. Who waits for less stays awake.
constexpr auto kAwake = std::chrono::microseconds(50);

}  // namespace

MemcpyPool::MemcpyPool(int threads) {
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error&) {
    // A process at its thread limit copies with the threads it could get.
  }
  size_ = threads_.size();
}

MemcpyPool::~MemcpyPool() { shutdown(); }

void MemcpyPool::start(Job& job) {
  const std::size_t parts = job.parts.size();  // behind the lock the job may be through, and gone
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job.next = 0;
    if (parts > 0) queue_.push_back(&job);
  }
  for (std::size_t i = 0; i < parts; ++i) work_.notify_one();
}

void MemcpyPool::finish(Job& job) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (job.next < job.parts.size()) do_next_part(job, lock);
  const auto asleep = Clock::now() + kAwake;
  while (!job.is_done() && Clock::now() < asleep) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
  done_.wait(lock, [&] { return job.is_done(); });
}

bool MemcpyPool::is_done(const Job& job) {
  std::lock_guard<std::mutex> lock(mutex_);
  return job.is_done();
}

void MemcpyPool::cancel(Job& job) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  job.next = job.parts.size();
  drop(job);
  done_.wait(lock, [&] { return job.is_done(); });
}

void MemcpyPool::shutdown() noexcept {
  std::vector<std::thread> threads;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);  // each is joined by one caller
  }
  work_.notify_all();
  for (auto& thread : threads) thread.join();
}

void MemcpyPool::drop(const Job& job) { queue_.erase(std::remove(queue_.begin(), queue_.end(), &job), queue_.end()); }

void MemcpyPool::do_next_part(Job& job, std::unique_lock<std::mutex>& lock) {
  const std::vector<HostCopy>& part = job.parts[job.next++];
  if (job.next == job.parts.size()) drop(job);
  ++job.running;
  lock.unlock();
  copy_on_host(part);
  lock.lock();
  --job.running;
  if (job.is_done()) done_.notify_all();  // under the lock, with which the job may go
}

void MemcpyPool::run() {
  name_this_thread("gpuprefetch-mem");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    do_next_part(*queue_.front(), lock);
  }
}

}  // namespace gpuprefetch
