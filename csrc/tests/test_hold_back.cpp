// HoldBack: how far copies run ahead of the consumer's device work.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "check.h"
#include "hold_back.h"
#include "simulated_device.h"

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
}
