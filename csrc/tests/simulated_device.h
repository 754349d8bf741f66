// A device in software, out of luck as often as it can be: what is queued runs late, on a thread of the device's own,
// and streams overtake each other at random.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "copy_engine.h"
#include "platform.h"

namespace gpuprefetch {

struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Its memory is host memory. Streams and events live as long as the device. All members, of streams too, may be called
// from any thread.
class SimulatedDevice {
 public:
  enum class Pace {
    kRandom,  // goes on by itself, with pauses
    kLate,    // runs nothing until somebody sleeps for it or has queried in vain several times
  };
  enum class Call { kCopy, kRecord, kQuery, kSynchronize };

  class Stream : public CopyEngine {
   public:
    explicit Stream(SimulatedDevice& device) : device_(device) {}

    // The source is read when the copy runs, and only then; a pageable one (see pin()) now. One that is pinned in part
    // is refused, as the driver does.
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
      device_.stumble();
      Bytes promised(from, from + bytes);
      std::unique_lock<std::mutex> lock(device_.mutex_);
      fail_if_told(Call::kCopy);
      const bool pinned = device_.is_pinned(from, bytes);
      if (!pinned && device_.is_pinned_in_part(from, bytes)) throw DeviceError("refused");
      SimulatedDevice* device = &device_;
      auto work = [=, promised = std::move(promised)] {
        if (bytes == 0) return;
        if (pinned && std::memcmp(from, promised.data(), bytes) != 0) ++device->overwritten_;
        std::memcpy(to, pinned ? from : promised.data(), bytes);
      };
      push(Operation{std::move(work), nullptr, nullptr, 0});
      lock.unlock();
      device_.stumble();
    }

    void record(Event event) override {
      device_.stumble();
      std::lock_guard<std::mutex> lock(device_.mutex_);
      fail_if_told(Call::kRecord);
      Mark* mark = static_cast<Mark*>(event);
      push(Operation{nullptr, nullptr, mark, ++mark->recorded});
    }

    bool query(Event event) override {
      device_.stumble();
      std::lock_guard<std::mutex> lock(device_.mutex_);
      fail_if_told(Call::kQuery);
      const Mark* mark = static_cast<Mark*>(event);
      if (mark->done >= mark->recorded) return true;
      if (below(device_.random_, 3) == 0) {
        device_.credit_ += 1 + below(device_.random_, 4);
        device_.changed_.notify_all();
      }
      return false;
    }

    void synchronize(Event event) override {
      std::unique_lock<std::mutex> lock(device_.mutex_);
      fail_if_told(Call::kSynchronize);
      const Mark* mark = static_cast<Mark*>(event);
      const std::size_t generation = mark->recorded;
      device_.sleep(lock, [&] { return mark->done >= generation; });
    }

    // What is queued from now on runs after the event's last record has.
    void wait(Event event) {
      std::lock_guard<std::mutex> lock(device_.mutex_);
      Mark* mark = static_cast<Mark*>(event);
      push(Operation{nullptr, mark, nullptr, mark->recorded});
    }

    void launch(std::function<void()> kernel) {
      std::lock_guard<std::mutex> lock(device_.mutex_);
      push(Operation{std::move(kernel), nullptr, nullptr, 0});
    }

    // No progress from here on, until let_go().
    void hold() {
      std::unique_lock<std::mutex> lock(device_.mutex_);
      allowed_ = 0;
      device_.changed_.wait(lock, [this] { return device_.running_ != this; });
    }

    void let_go() {
      std::lock_guard<std::mutex> lock(device_.mutex_);
      allowed_ = kNoLimit;
      device_.changed_.notify_all();
    }

    // Lets a stream on hold run that many operations, which must be queued, and returns when they have run.
    void step(std::int64_t operations) {
      std::unique_lock<std::mutex> lock(device_.mutex_);
      CHECK_EQ(allowed_, 0);
      CHECK_LE(operations, queue_.size());
      allowed_ = operations;
      device_.sleep(lock, [this] { return allowed_ == 0; });
    }

    // The k-th such call from now on fails, counted from 0, and that one only. A copy or record that fails is not
    // queued; a synchronize does not wait. Negative: none.
    void fail_at(Call call, std::int64_t k) {
      std::lock_guard<std::mutex> lock(device_.mutex_);
      until_failure_[static_cast<std::size_t>(call)] = k;
    }

   private:
    friend class SimulatedDevice;
    static constexpr std::int64_t kNoLimit = -1;

    struct Mark {
      std::size_t recorded = 0;
      std::size_t done = 0;
    };

    struct Operation {
      std::function<void()> work;
      Mark* awaits;
      Mark* marks;
      std::size_t generation;  // of the event
    };

    void push(Operation operation) {
      queue_.push_back(std::move(operation));
      device_.changed_.notify_all();
    }

    void fail_if_told(Call call) {
      std::int64_t& left = until_failure_[static_cast<std::size_t>(call)];
      if (left >= 0 && left-- == 0) throw DeviceError("told to fail");
    }

    bool can_run() const {
      if (queue_.empty() || allowed_ == 0) return false;
      const Operation& operation = queue_.front();
      return operation.awaits == nullptr || operation.awaits->done >= operation.generation;
    }

    SimulatedDevice& device_;
    std::deque<Operation> queue_;
    std::int64_t allowed_ = kNoLimit;  // operations before the next hold
    std::int64_t until_failure_[4] = {-1, -1, -1, -1};
  };

  SimulatedDevice(Pace pace, std::size_t seed) : pace_(pace), random_(seed), thread_([this] { run(); }) {}
  SimulatedDevice(const SimulatedDevice&) = delete;
  SimulatedDevice& operator=(const SimulatedDevice&) = delete;

  // Call finish() before: whoever queues copies waits for them.
  ~SimulatedDevice() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      CHECK(idle());
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  Stream& make_stream() {
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.push_back(std::make_unique<Stream>(*this));
    return *streams_.back();
  }

  std::vector<Event> make_events(std::int64_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Event> events;
    for (std::int64_t i = 0; i < count; ++i) {
      marks_.push_back(std::make_unique<Stream::Mark>());
      events.push_back(marks_.back().get());
    }
    return events;
  }

  // All other memory is pageable.
  void pin(const std::byte* memory, std::size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    pinned_.emplace_back(memory, bytes);
  }

  // Sleeps until everything queued has run.
  void finish() {
    std::unique_lock<std::mutex> lock(mutex_);
    sleep(lock, [this] { return idle(); });
  }

  // Sleeps until that many threads sleep for the device.
  void await_sleepers(std::int64_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return sleepers_ >= count; });
  }

  // Copies whose pinned source was no longer what it had been when they were queued. Right code leaves it at 0.
  std::int64_t overwritten() const { return overwritten_; }

 private:
  // A thread may lose the processor anywhere; here it does so often.
  void stumble() {
    std::size_t luck = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      luck = random_();
    }
    if (luck % 16 == 0) {
      ShortSleep().sleep(std::chrono::microseconds(1 + luck / 16 % 100));
    } else if (luck % 4 == 0) {
      std::this_thread::yield();
    }
  }

  template <typename Condition>
  void sleep(std::unique_lock<std::mutex>& lock, Condition condition) {
    ++sleepers_;
    changed_.notify_all();
    changed_.wait(lock, condition);
    --sleepers_;
  }

  bool idle() const {
    return std::all_of(streams_.begin(), streams_.end(), [](const auto& stream) { return stream->queue_.empty(); });
  }

  bool is_pinned(const std::byte* from, std::size_t bytes) const {
    return std::any_of(pinned_.begin(), pinned_.end(), [&](const auto& range) {
      const std::less_equal<const std::byte*> reaches;
      return reaches(range.first, from) && reaches(from + bytes, range.first + range.second);
    });
  }

  bool is_pinned_in_part(const std::byte* from, std::size_t bytes) const {
    return std::any_of(pinned_.begin(), pinned_.end(), [&](const auto& range) {
      const std::less<const std::byte*> before;
      return before(from, range.first + range.second) && before(range.first, from + bytes);
    });
  }

  // A stream that can go on, or nullptr. One is preferred for a while, so that it gets far ahead of the others.
  Stream* next() {
    if (pace_ == Pace::kLate && sleepers_ == 0 && credit_ == 0) return nullptr;
    std::vector<Stream*> able;
    for (const auto& stream : streams_) {
      if (stream->can_run()) able.push_back(stream.get());
    }
    if (able.empty()) return nullptr;
    const bool keep = std::find(able.begin(), able.end(), preferred_) != able.end() && below(random_, 16) != 0;
    if (!keep) preferred_ = able[below(random_, able.size())];
    return preferred_;
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ending_ || (running_ = next()) != nullptr; });
      if (ending_) return;
      Stream::Operation& operation = running_->queue_.front();
      lock.unlock();
      stumble();
      if (operation.work) operation.work();
      lock.lock();
      if (operation.marks != nullptr) {
        operation.marks->done = (std::max)(operation.marks->done, operation.generation);
      }
      running_->queue_.pop_front();
      if (running_->allowed_ > 0) --running_->allowed_;
      if (credit_ > 0) --credit_;
      running_ = nullptr;
      changed_.notify_all();
    }
  }

  const Pace pace_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Random random_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::unique_ptr<Stream::Mark>> marks_;
  std::vector<std::pair<const std::byte*, std::size_t>> pinned_;
  Stream* preferred_ = nullptr;
  Stream* running_ = nullptr;
  std::int64_t sleepers_ = 0;
  std::size_t credit_ = 0;  // operations that queries have earned, for kLate
  bool ending_ = false;
  std::atomic<std::int64_t> overwritten_{0};
  std::thread thread_;
};

}  // namespace gpuprefetch
