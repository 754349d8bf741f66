#include "memcpy_pool.h"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "platform.h"

namespace gpuprefetch {
namespace {

void copy_all(const std::vector<MemcpyPool::Copy>& copies) {
  for (const auto& copy : copies) {
    if (copy.from == nullptr) {
      std::memset(copy.to, 0, copy.bytes);
    } else {
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
  }
}

}  // namespace

MemcpyPool::MemcpyPool(int threads) {
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error&) {
    // A process at its thread limit copies with the threads it could get.
  }
}

MemcpyPool::~MemcpyPool() { shutdown(); }

void MemcpyPool::start(Job& job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(&job);
    job.state = Job::State::kQueued;
  }
  work_.notify_one();
}

void MemcpyPool::finish(Job& job) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (take_back(job)) {
    lock.unlock();
    copy_all(job.copies);
    return;
  }
  done_.wait(lock, [&] { return job.state != Job::State::kRunning; });
}

void MemcpyPool::cancel(Job& job) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!take_back(job)) done_.wait(lock, [&] { return job.state != Job::State::kRunning; });
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

// True if no thread has begun the job: it is the caller's from here on.
bool MemcpyPool::take_back(Job& job) {
  if (job.state == Job::State::kQueued) queue_.erase(std::find(queue_.begin(), queue_.end(), &job));
  if (job.state != Job::State::kIdle && job.state != Job::State::kQueued) return false;
  job.state = Job::State::kDone;
  return true;
}

void MemcpyPool::run() {
  name_this_thread("gpuprefetch-mem");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    Job& job = *queue_.front();
    queue_.pop_front();
    job.state = Job::State::kRunning;
    lock.unlock();
    copy_all(job.copies);
    lock.lock();
    job.state = Job::State::kDone;  // under the lock, with which the job may go
    done_.notify_all();
  }
}

}  // namespace gpuprefetch
