// Copier and consumer of an epoch, held back by HoldBack, around ring, pool and a simulated device.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "hold_back.h"
#include "simulated_device.h"
#include "staged_copy.h"

namespace gpuprefetch {
namespace {

using std::chrono::milliseconds;
using Pace = SimulatedDevice::Pace;
using Room = HoldBack::Room;

constexpr milliseconds kNever = std::chrono::hours(1);

// What copier and consumer share of the device.
struct Machine {
  Machine(std::size_t pieces, std::size_t piece_bytes, Pace pace, std::size_t seed)
      : memory(pieces * piece_bytes),
        device(pace, seed),
        copy_stream(device.make_stream()),
        ring(memory.data(), piece_bytes, device.make_events(static_cast<std::int64_t>(pieces))),
        pool(2) {
    device.pin(memory.data(), memory.size());
  }
  ~Machine() {
    device.finish();
    CHECK_EQ(device.overwritten(), 0);
  }

  Bytes memory;
  SimulatedDevice device;
  SimulatedDevice::Stream& copy_stream;
  PinnedRing ring;
  MemcpyPool pool;
};

// One epoch: a thread that makes and copies batches, and next() for the consumer. Hold-back is told each batch is
// `scale` times as large as it is.
class Epoch {
 public:
  Epoch(Machine& machine, std::int64_t prefetch_batches, std::int64_t batches, std::int64_t scale, std::size_t seed)
      : machine_(machine),
        prefetch_batches_(prefetch_batches),
        batches_(batches),
        scale_(scale),
        seed_(seed),
        stream_(machine.device.make_stream()),
        copied_(machine.device.make_events(batches)),
        hold_back_(prefetch_batches, machine.device.make_events(HoldBack::events_needed(prefetch_batches)), kNever),
        thread_([this] { run(); }) {}
  Epoch(const Epoch&) = delete;
  Epoch& operator=(const Epoch&) = delete;
  ~Epoch() {
    hold_back_.stop();
    thread_.join();
    machine_.device.finish();
    CHECK(wrong_ == 0);
  }

  // Takes the next batch and queues work on it, which checks every byte when it runs. False at the end.
  bool next() {
    if (taken_ == batches_) return false;
    stream_.record(hold_back_.begin_ask());
    hold_back_.end_ask();
    std::shared_ptr<Bytes> batch;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !ready_.empty(); });
      batch = std::move(ready_.front());
      ready_.pop_front();
    }
    const std::int64_t number = taken_++;
    stream_.wait(copied_[static_cast<std::size_t>(number)]);
    stream_.launch([this, batch = std::move(batch), number]() mutable {
      if (*batch != source(number)) ++wrong_;
      batch.reset();
      finished_ = number + 1;
    });
    return true;
  }

 private:
  Bytes source(std::int64_t number) const {
    const std::size_t seed = seed_ * 100000 + static_cast<std::size_t>(number);
    Random random(seed);
    return pattern(below(random, 3000), seed);
  }

  void run() {
    Bytes reused;  // datasets that reuse one buffer are common
    std::vector<std::int64_t> bytes;
    for (std::int64_t number = 0; number < batches_; ++number) {
      const Bytes next = source(number);
      reused.resize(3000);
      std::copy(next.begin(), next.end(), reused.begin());
      bytes.push_back(static_cast<std::int64_t>(next.size()) * scale_);
      const Room room = hold_back_.wait_for_room(number, bytes.back(), machine_.copy_stream);
      if (room == Room::kStopped) return;
      CHECK_EQ(room, Room::kFree);
      // Every third batch finds the device full.
      const bool waits = number % 3 == 0 && hold_back_.grows(number);
      if (waits && hold_back_.wait_for_memory(number, machine_.copy_stream) == HoldBack::Room::kStopped) return;
      hold_back_.took_memory(number);
      check_bound(number, bytes);
      auto batch = std::make_shared<Bytes>(next.size());
      const std::size_t cut = next.size() / 3;
      const std::vector<Extent> extents{{reused.data(), 0, cut}, {reused.data() + cut, cut, next.size() - cut}};
      const std::vector<Destination> destinations{{batch->data(), next.size(), extents}};
      staged_copy(destinations, machine_.ring, machine_.pool, machine_.copy_stream);
      machine_.copy_stream.record(copied_[static_cast<std::size_t>(number)]);
      std::lock_guard<std::mutex> lock(mutex_);
      ready_.push_back(std::move(batch));
      changed_.notify_one();
    }
  }

  // With this batch, at most prefetch_batches + 1 are unfinished, or a number of small ones.
  void check_bound(std::int64_t number, const std::vector<std::int64_t>& bytes) const {
    const std::int64_t finished = finished_;
    const std::int64_t unfinished = number + 1 - finished;
    if (unfinished <= prefetch_batches_ + 1) return;
    CHECK_LE(unfinished, prefetch_batches_ + 1 + HoldBack::kSmallBatches);
    std::int64_t sum = 0;
    for (std::int64_t n = finished; n <= number; ++n) sum += bytes[static_cast<std::size_t>(n)];
    CHECK_LE(sum, HoldBack::kSmallBytes);
  }

  Machine& machine_;
  const std::int64_t prefetch_batches_;
  const std::int64_t batches_;
  const std::int64_t scale_;
  const std::size_t seed_;
  SimulatedDevice::Stream& stream_;  // the consumer's
  const std::vector<Event> copied_;
  HoldBack hold_back_;
  std::int64_t taken_ = 0;
  std::atomic<std::int64_t> finished_{0};  // batches that the device is done with
  std::atomic<std::int64_t> wrong_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Bytes>> ready_;
  std::thread thread_;
};

constexpr std::int64_t kScales[] = {1, 8 << 10, 1 << 20};  // all small, about 12 MiB, large

// Thousands of batches, every byte checked, memory bounded all the way.
void copier_and_consumer() {
  std::int64_t number = 0;
  for (std::int64_t scale : kScales) {
    for (std::int64_t prefetch_batches : {1, 3}) {
      current_case = ++number;
      const Pace pace = number % 3 == 0 ? Pace::kLate : Pace::kRandom;
      Machine machine(number % 2 == 0 ? 1 : 4, 256, pace, static_cast<std::size_t>(number));
      Epoch epoch(machine, prefetch_batches, 400, scale, static_cast<std::size_t>(number));
      while (epoch.next()) {
      }
    }
  }
}

// zip(iter(p), iter(p)), and a validation loop inside a paused epoch: the paused copier holds nothing that others need.
void two_epochs_share_one_ring() {
  std::int64_t number = 0;
  for (std::size_t pieces : {1, 2}) {
    for (Pace pace : {Pace::kRandom, Pace::kLate}) {
      current_case = ++number;
      Machine machine(pieces, 256, pace, static_cast<std::size_t>(number));
      Epoch first(machine, 2, 60, 1 << 20, 1);
      Epoch second(machine, 1, 60, 1 << 20, 2);
      for (int i = 0; i < 20; ++i) {
        CHECK(first.next());
        CHECK(second.next());
      }
      {
        Epoch validation(machine, 2, 60, 1 << 20, 3);
        while (validation.next()) {
        }
      }
      while (second.next()) {
      }
      while (first.next()) {
      }
    }
  }
}

// Left early, with the copier anywhere.
void an_epoch_ends_at_any_moment() {
  for (std::int64_t taken = 0; taken < 30; ++taken) {
    current_case = taken;
    Machine machine(2, 256, taken % 2 == 0 ? Pace::kRandom : Pace::kLate, static_cast<std::size_t>(taken));
    Epoch epoch(machine, 2, 100, kScales[taken % 3], 1);
    for (std::int64_t i = 0; i < taken; ++i) CHECK(epoch.next());
  }
}

}  // namespace
}  // namespace gpuprefetch

int main() {
  using namespace gpuprefetch;
  Watchdog watchdog(std::chrono::seconds(120));
  RUN(copier_and_consumer);
  RUN(two_epochs_share_one_ring);
  RUN(an_epoch_ends_at_any_moment);
}
