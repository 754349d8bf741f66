// HoldBack: how far copies run ahead of the consumer's device work, and the loop of copier and consumer around it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "hold_back.h"
#include "simulated_device.h"
#include "staged_copy.h"

namespace gpuprefetch {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Pace = SimulatedDevice::Pace;
using Call = SimulatedDevice::Call;
using Room = HoldBack::Room;

constexpr std::int64_t kLarge = HoldBack::kSmallBytes + 1;
constexpr milliseconds kNever = std::chrono::hours(1);

// A consumer whose stream runs only by step(): the number of its batches that are finished is exactly known.
struct Rig {
  explicit Rig(std::int64_t prefetch_batches, milliseconds overdue_after = kNever)
      : device(Pace::kRandom, 1),
        stream(device.make_stream()),
        copy_stream(device.make_stream()),
        hold_back(prefetch_batches, device.make_events(HoldBack::events_needed(prefetch_batches)), overdue_after) {
    stream.hold();
  }
  ~Rig() {
    stream.let_go();
    device.finish();
  }

  // The consumer asks for its next batch.
  void ask() {
    stream.record(hold_back.begin_ask());
    hold_back.end_ask();
    ++asked;
  }

  // The work on all batches before `batch` ends, as far as it has been launched.
  void finish_before(std::int64_t batch) {
    for (; events_run <= batch && events_run < asked; ++events_run) stream.step(1);
  }

  Room room(std::int64_t batch, std::int64_t bytes) { return hold_back.wait_for_room(batch, bytes, copy_stream); }

  SimulatedDevice device;
  SimulatedDevice::Stream& stream;
  SimulatedDevice::Stream& copy_stream;
  HoldBack hold_back;
  std::int64_t asked = 0;
  std::int64_t events_run = 0;
};

// With overdue_after = 0 and the consumer waiting, wait_for_room() answers at once. Batch m finds room if and only if
// the consumer's work on all batches before m - prefetch_batches is done.
void a_large_batch_waits_for_one_event_and_no_more() {
  for (std::int64_t prefetch_batches : {1, 2, 3, 7}) {
    Rig rig(prefetch_batches, milliseconds(0));
    for (std::int64_t batch = 0; batch < 100; ++batch) {
      current_case = batch;
      rig.ask();
      const std::int64_t needed = batch - prefetch_batches;
      if (needed > 0) {
        rig.finish_before(needed - 1);
        CHECK_EQ(rig.room(batch, kLarge), Room::kOverdue);
        rig.finish_before(needed);
      }
      CHECK_EQ(rig.room(batch, kLarge), Room::kFree);
    }
  }
}

void small_batches_lag_up_to_the_limits() {
  for (std::int64_t prefetch_batches : {1, 2, 5}) {
    // By number: 16 batches further than large ones.
    {
      Rig rig(prefetch_batches, milliseconds(0));
      for (std::int64_t batch = 0; batch < 100; ++batch) {
        current_case = batch;
        rig.ask();
        const std::int64_t needed = batch - prefetch_batches - HoldBack::kSmallBatches;
        if (needed > 0) {
          rig.finish_before(needed - 1);
          CHECK_EQ(rig.room(batch, 1), Room::kOverdue);
          rig.finish_before(needed);
        }
        CHECK_EQ(rig.room(batch, 1), Room::kFree);
      }
    }
    // By bytes: eight batches of 8 MiB are 64 MiB, one byte more is too much.
    Rig rig(prefetch_batches, milliseconds(0));
    for (std::int64_t batch = 0; batch < 100; ++batch) {
      current_case = batch;
      rig.ask();
      const std::int64_t needed = batch - 7;
      if (needed > 0) {
        rig.finish_before(needed - 1);
        CHECK_EQ(rig.room(batch, 8 << 20), Room::kOverdue);
        rig.finish_before(needed);
        CHECK_EQ(rig.room(batch, (8 << 20) + 1), Room::kOverdue);
      }
      CHECK_EQ(rig.room(batch, 8 << 20), Room::kFree);
    }
  }
}

// Random sizes and progress against the rule, written down once more.
void room_follows_the_rule() {
  for (std::size_t seed = 0; seed < 20; ++seed) {
    Random random(seed);
    const std::int64_t prefetch_batches = static_cast<std::int64_t>(1 + below(random, 4));
    Rig rig(prefetch_batches, milliseconds(0));
    std::vector<std::int64_t> bytes;
    std::int64_t finished = 0;
    bool only_small = false;
    for (std::int64_t batch = 0; batch < 150; ++batch) {
      current_case = static_cast<std::int64_t>(seed) * 1000 + batch;
      if (batch % 30 == 0) only_small = below(random, 2) == 0;
      bytes.push_back(static_cast<std::int64_t>(only_small ? below(random, 6 << 20) : below(random, 40 << 20)));
      rig.ask();
      for (;;) {
        std::int64_t unfinished = 0;
        for (std::int64_t n = finished; n <= batch; ++n) unfinished += bytes[static_cast<std::size_t>(n)];
        const std::int64_t count = batch - finished + 1;
        const bool few = count <= prefetch_batches + 1 + HoldBack::kSmallBatches;
        const bool small = few && unfinished <= HoldBack::kSmallBytes;
        const Room expected = count <= prefetch_batches + 1 || small ? Room::kFree : Room::kOverdue;
        CHECK_EQ(rig.room(batch, bytes.back()), expected);
        if (expected == Room::kFree) break;
        rig.finish_before(++finished);
      }
      if (below(random, 3) == 0 && finished < batch) {
        finished += static_cast<std::int64_t>(below(random, static_cast<std::size_t>(batch - finished) + 1));
        rig.finish_before(finished);
      }
    }
  }
}

// Runs `wait` on a thread, checks that it is still there after `grace`, then calls `end`, and returns how long the wait
// took from there on.
template <typename Wait, typename End>
Clock::duration time_to_end(Wait wait, milliseconds grace, End end) {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<Clock::time_point> ended;
  std::thread thread([&] {
    wait();
    std::lock_guard<std::mutex> lock(mutex);
    ended = Clock::now();
    changed.notify_all();
  });
  {
    std::unique_lock<std::mutex> lock(mutex);
    CHECK(!changed.wait_for(lock, grace, [&] { return ended.has_value(); }));
  }
  const auto start = Clock::now();
  end();
  thread.join();
  return *ended - start;
}

// The first two wait for nothing, the others up to prefetch_batches for the consumer's second question only.
void the_first_batches_wait_for_no_progress() {
  for (std::int64_t prefetch_batches : {1, 2, 5}) {
    Rig rig(prefetch_batches);
    for (std::int64_t batch : {0, 1}) CHECK_EQ(rig.room(batch, 10 * kLarge), Room::kFree);
    if (prefetch_batches == 1) continue;
    rig.ask();
    time_to_end([&] { CHECK_EQ(rig.room(2, 10 * kLarge), Room::kFree); }, milliseconds(30), [&] { rig.ask(); });
    for (std::int64_t batch = 3; batch <= prefetch_batches; ++batch) {
      CHECK_EQ(rig.room(batch, 10 * kLarge), Room::kFree);
    }
  }
}

void stop_ends_every_wait() {
  for (milliseconds grace : {milliseconds(0), milliseconds(100)}) {  // long waits sleep longer
    Rig rig(1);
    rig.ask();
    const auto room =
        time_to_end([&] { CHECK_EQ(rig.room(2, kLarge), Room::kStopped); }, grace, [&] { rig.hold_back.stop(); });
    CHECK(room < milliseconds(500));
    CHECK(rig.hold_back.stopped());
    CHECK_EQ(rig.room(0, 1), Room::kStopped);  // for ever
    CHECK(rig.hold_back.wait_until_due(0, rig.copy_stream) == HoldBack::Room::kStopped);

    Rig other(1);
    CHECK(!other.hold_back.stopped());
    const auto due =
        time_to_end([&] { CHECK(other.hold_back.wait_until_due(0, other.copy_stream) == HoldBack::Room::kStopped); },
                    grace, [&] { other.hold_back.stop(); });
    CHECK(due < milliseconds(500));

    Rig third(1);
    CHECK_EQ(third.room(0, kLarge), Room::kFree);
    const auto memory =
        time_to_end([&] { CHECK(third.hold_back.wait_for_memory(0, third.copy_stream) == HoldBack::Room::kStopped); },
                    grace, [&] { third.hold_back.stop(); });
    CHECK(memory < milliseconds(500));
  }
}

// Time in which the consumer does not wait for the batch does not count, however long.
void a_batch_is_overdue_only_while_the_consumer_waits_for_it() {
  constexpr milliseconds kOverdueAfter(40);
  Rig rig(1, kOverdueAfter);
  rig.ask();
  rig.ask();  // for batches 0 and 1
  const auto waited =
      time_to_end([&] { CHECK_EQ(rig.room(2, kLarge), Room::kOverdue); }, 4 * kOverdueAfter, [&] { rig.ask(); });
  CHECK(waited >= kOverdueAfter);
  CHECK(waited < kOverdueAfter + milliseconds(500));

  // Progress in time: not overdue.
  Rig other(1);
  for (int i = 0; i < 3; ++i) other.ask();
  time_to_end([&] { CHECK_EQ(other.room(2, kLarge), Room::kFree); }, milliseconds(20), [&] { other.finish_before(1); });
}

// More overdue batches than there are events: each event stands for a later batch than before. No room is seen where
// there is none, and once the device has caught up the rule holds exactly again.
void events_are_reused_while_everything_is_overdue() {
  Rig rig(2, milliseconds(0));
  std::int64_t batch = 0;
  for (; batch < 3 * HoldBack::events_needed(2) + 5; ++batch) {
    rig.ask();
    CHECK_EQ(rig.room(batch, kLarge), batch <= 2 ? Room::kFree : Room::kOverdue);
  }
  rig.finish_before(batch - 4);  // batch - 1 is the last one that was asked for
  CHECK_EQ(rig.room(batch - 1, kLarge), Room::kOverdue);
  rig.finish_before(batch - 1);
  CHECK_EQ(rig.room(batch - 1, kLarge), Room::kFree);
  for (const std::int64_t end = batch + 50; batch < end; ++batch) {
    rig.ask();
    rig.finish_before(batch - 3);
    CHECK_EQ(rig.room(batch, kLarge), batch - 2 <= rig.events_run - 1 ? Room::kFree : Room::kOverdue);
    rig.finish_before(batch - 2);
    CHECK_EQ(rig.room(batch, kLarge), Room::kFree);
  }
}

void due_is_a_batch_that_is_asked_for_when_all_before_are_done() {
  for (bool asked_first : {true, false}) {
    Rig rig(2);
    for (int i = 0; i < 3; ++i) rig.ask();
    std::atomic<bool> due{false};
    rig.finish_before(2);
    if (asked_first) rig.ask();
    time_to_end(
        [&] {
          CHECK(rig.hold_back.wait_until_due(3, rig.copy_stream) == HoldBack::Room::kFree);
          CHECK(due);
        },
        milliseconds(30),
        [&] {
          due = true;
          if (!asked_first) rig.ask();
          rig.finish_before(3);
        });
    CHECK(rig.hold_back.wait_until_due(3, rig.copy_stream) == HoldBack::Room::kFree);  // at once
    CHECK(rig.hold_back.wait_until_due(1, rig.copy_stream) == HoldBack::Room::kFree);
  }
}

// In use are the unfinished batches and the one before, here four at a time.
void a_batch_grows_when_more_is_in_use_than_ever_before() {
  Rig rig(2, milliseconds(0));
  const auto grows = [&rig](std::int64_t batch, std::int64_t bytes) {
    rig.ask();
    rig.finish_before(batch - 2);
    CHECK_EQ(rig.room(batch, bytes), Room::kFree);
    const bool result = rig.hold_back.grows(batch);
    rig.hold_back.took_memory(batch);
    CHECK(!rig.hold_back.grows(batch));
    return result;
  };
  for (std::int64_t batch = 0; batch < 4; ++batch) CHECK(grows(batch, kLarge));
  CHECK(!grows(4, kLarge));
  CHECK(grows(5, kLarge + 1));
  CHECK(!grows(6, kLarge));
  CHECK(!grows(7, kLarge));
  CHECK(grows(8, kLarge + 1));
  for (std::int64_t batch = 9; batch < 14; ++batch) CHECK(!grows(batch, 1));
  CHECK(!grows(14, 4 * kLarge - 1));  // what was taken once counts for ever
  CHECK(grows(15, 4 * kLarge));
}

// Batch 3 is too large beside 0, 1 and 2. It finds memory when it no longer grows, or when it is due.
void a_batch_that_grows_waits_for_memory() {
  for (bool shrinks : {true, false}) {
    Rig rig(2);
    for (std::int64_t batch = 0; batch < 3; ++batch) {
      rig.ask();
      CHECK_EQ(rig.room(batch, kLarge), Room::kFree);
      rig.hold_back.took_memory(batch);
    }
    rig.finish_before(shrinks ? 1 : 2);
    CHECK_EQ(rig.room(3, shrinks ? kLarge : 10 * kLarge), Room::kFree);
    CHECK(rig.hold_back.grows(3));
    CHECK(!rig.hold_back.short_of_memory());
    std::atomic<bool> going{false};
    time_to_end(
        [&] {
          CHECK(rig.hold_back.wait_for_memory(3, rig.copy_stream) == HoldBack::Room::kFree);
          CHECK(going);
        },
        milliseconds(30),
        [&] {
          going = true;
          if (shrinks) {
            rig.finish_before(2);  // 1 to 3 are as large as 0 to 2 were
          } else {
            rig.ask();
            rig.finish_before(3);
          }
        });
    CHECK_EQ(rig.hold_back.grows(3), !shrinks);
    CHECK(rig.hold_back.short_of_memory());
  }
}

void an_interrupt_ends_the_wait_until_due() {
  for (int calls : {1, 3}) {
    Rig rig(1);
    rig.ask();
    rig.ask();
    int called = 0;
    const auto start = Clock::now();
    bool interrupted = false;
    try {
      rig.hold_back.wait_until_due(1, rig.copy_stream, [&] {
        if (++called == calls) throw DeviceError("Ctrl-C");
      });
    } catch (const DeviceError&) {
      interrupted = true;
    }
    CHECK(interrupted);
    CHECK(Clock::now() - start >= calls * milliseconds(100));
    rig.finish_before(1);
    CHECK(rig.hold_back.wait_until_due(1, rig.copy_stream) == HoldBack::Room::kFree);
  }
}

void a_failed_query_leaves_the_wait_and_the_next_call_is_right() {
  for (std::int64_t k : {0, 1}) {
    Rig rig(1, milliseconds(0));
    for (int i = 0; i < 4; ++i) rig.ask();
    rig.finish_before(2);
    rig.copy_stream.fail_at(Call::kQuery, k);
    CHECK(throws<DeviceError>([&] { rig.room(3, kLarge); }));
    CHECK_EQ(rig.room(3, kLarge), Room::kFree);
  }
}

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
  RUN(the_first_batches_wait_for_no_progress);
  RUN(a_large_batch_waits_for_one_event_and_no_more);
  RUN(small_batches_lag_up_to_the_limits);
  RUN(room_follows_the_rule);
  RUN(stop_ends_every_wait);
  RUN(an_interrupt_ends_the_wait_until_due);
  RUN(a_batch_is_overdue_only_while_the_consumer_waits_for_it);
  RUN(events_are_reused_while_everything_is_overdue);
  RUN(due_is_a_batch_that_is_asked_for_when_all_before_are_done);
  RUN(a_batch_grows_when_more_is_in_use_than_ever_before);
  RUN(a_batch_that_grows_waits_for_memory);
  RUN(a_failed_query_leaves_the_wait_and_the_next_call_is_right);
  RUN(copier_and_consumer);
  RUN(two_epochs_share_one_ring);
  RUN(an_epoch_ends_at_any_moment);
}
