// staged_copy: an error is one of its batch. Ring and pool are whole after it, and the next batch is right.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "check.h"
#include "counted_allocations.h"
#include "packing.h"
#include "runs.h"
#include "simulated_device.h"
#include "staged_copy.h"
#include "staged_rig.h"

namespace gpuprefetch {
namespace {

// A device that is lost refuses the ring as well.
void a_copy_that_fails_by_the_ring_too_is_an_error() {
  class Lost final : public Forwarding {
   public:
    using Forwarding::Forwarding;
    void copy(std::byte*, const std::byte*, std::size_t) override { throw DeviceError("lost"); }
  };
  Rig rig(2, kLargePiece, 2, Pace::kRandom);
  Batch batch(1);
  batch.add(3 * kLargePiece);
  Lost lost(rig.stream);
  CHECK(throws<DeviceError>([&] { copy_batch(batch.destinations(), {}, &rig.ring, rig.pool, lost); }));
  rig.check_whole();
}

// Refuses each allocation of a batch in turn. The batch is an error then, and the ring is whole.
void no_piece_is_lost_where_memory_runs_out() {
  std::int64_t refused = 0;
  for (std::int64_t k = 0;; ++k) {
    current_case = k;
    Rig rig(4, kSmallPiece, 0, Pace::kRandom);
    Batch batch(1);
    batch.add(20 * kSmallPiece);
    batch.add_pack(Sizes(40, 30));
    Counting engine(rig.stream);
    engine.lengths.reserve(100);
    allocations_left = k;
    const bool failed = throws<std::bad_alloc>([&] { staged_copy(batch.destinations(), rig.ring, rig.pool, engine); });
    allocations_left = -1;
    rig.check_whole();
    CHECK_EQ(batch.arrived(), !failed);
    if (!failed) break;
    ++refused;
  }
  CHECK_GE(refused, 4);
}

// The pool's threads are at several parts of each run when the batch ends: none may read a source afterwards.
void no_thread_goes_on_where_memory_runs_out() {
  std::int64_t refused = 0;
  for (std::int64_t k = 0;; ++k) {
    current_case = k;
    Rig rig(2, 4 * kLeastRun, 3, Pace::kRandom);
    Batch batch(1);
    batch.add(8 * kLeastRun + 5);
    allocations_left = k;
    const bool failed = throws<std::bad_alloc>([&] { batch.copy(rig.ring, rig.pool, rig.stream); });
    allocations_left = -1;
    rig.check_whole();
    if (!failed) {
      CHECK(batch.arrived());
      break;
    }
    ++refused;
  }
  CHECK_GE(refused, 4);
}

// Fails the first such call of a batch, the second, and so on, until the batch has no further one. Batches before it
// are under way; the one after it must be right.
void one_call_fails_in_the_middle_of_a_batch() {
  for (Call call : {Call::kCopy, Call::kRecord, Call::kQuery, Call::kSynchronize}) {
    std::int64_t failures = 0;
    for (Pace pace : {Pace::kRandom, Pace::kLate}) {
      for (std::size_t pieces : {1, 3}) {
        for (int threads : {0, 2}) {
          for (std::int64_t k = 0;; ++k) {
            current_case = static_cast<std::int64_t>(call) * 1000 + k;
            Rig rig(pieces, kLargePiece, threads, pace, static_cast<std::size_t>(k));
            Batch before(1);
            before.add(kLargePiece);
            before.copy(rig.ring, rig.pool, rig.stream);
            Batch failing(2);
            failing.add(Sizes(5, kLargePiece / 2 + 1), Sizes(5, 0));
            failing.add(kLargePiece);
            for (int i = 0; i < 3; ++i) failing.add(1000);  // in one piece, part of which is on its way at a failure
            failing.add(kLargePiece);
            rig.stream.fail_at(call, k);
            const bool failed = throws<DeviceError>([&] { failing.copy(rig.ring, rig.pool, rig.stream); });
            rig.stream.fail_at(call, -1);
            Batch after(3);
            after.add(3 * kLargePiece + 7);
            after.copy(rig.ring, rig.pool, rig.stream);
            rig.check_whole();
            CHECK(before.arrived());
            CHECK(after.arrived());
            CHECK(failed || failing.arrived());
            if (!failed) break;
            ++failures;
          }
        }
      }
    }
    CHECK_GE(failures, 4);
  }
}

// Leaves before the failure may have arrived, those behind it have not; the ring, far smaller than the pack, is whole.
void one_copy_fails_in_the_middle_of_a_pack() {
  const Sizes leaves(40, 300);
  for (std::size_t piece_bytes : {kSmallPiece, std::size_t{4096}}) {
    const std::size_t copies = (39 * kLeafAlignment + 300 + piece_bytes - 1) / piece_bytes;
    for (std::size_t pieces : {1, 2}) {
      for (int threads : {0, 2}) {
        for (std::size_t k = 0; k < copies; ++k) {
          current_case = static_cast<std::int64_t>(k);
          Rig rig(pieces, piece_bytes, threads, Pace::kRandom, k);
          Batch failing(1);
          failing.add_pack(leaves);
          rig.stream.fail_at(Call::kCopy, static_cast<std::int64_t>(k));
          CHECK(throws<DeviceError>([&] { failing.copy(rig.ring, rig.pool, rig.stream); }));
          Batch after(2);
          after.add_pack(leaves);
          after.copy(rig.ring, rig.pool, rig.stream);
          rig.check_whole();
          CHECK(!failing.arrived());
          CHECK(after.arrived());
        }
      }
    }
  }
}

// A copy that was queued reads its piece, whatever became of the record behind it: the call that fails waits for it.
void a_failed_record_is_settled() {
  Rig rig(2, kLargePiece, 0, Pace::kRandom);
  Batch batch(1);
  batch.add(kLargePiece);
  rig.stream.hold();
  rig.stream.fail_at(Call::kRecord, 0);
  std::atomic<bool> going{false};
  std::thread caller([&] {
    CHECK(throws<DeviceError>([&] { batch.copy(rig.ring, rig.pool, rig.stream); }));
    CHECK(going);
    std::memset(rig.memory.data(), 0xFF, rig.memory.size());
  });
  rig.device.await_sleepers(1);
  going = true;
  rig.stream.let_go();
  caller.join();
  rig.device.finish();
  CHECK_EQ(rig.device.overwritten(), 0);
}

// One caller's errors are not another's.
void others_go_on_while_one_caller_fails() {
  std::int64_t number = 0;
  for (std::size_t pieces : {1, 2, 4}) {
    for (Pace pace : {Pace::kRandom, Pace::kLate}) {
      current_case = ++number;
      Rig rig(pieces, kLargePiece, 2, pace, static_cast<std::size_t>(number));
      SimulatedDevice::Stream& unlucky = rig.device.make_stream();
      std::vector<std::thread> threads;
      threads.emplace_back([&] {
        std::vector<Batch> batches;
        for (std::int64_t i = 0; i < 12; ++i) {
          batches.emplace_back(1);
          batches.back().add(4 * kLargePiece);
          // Without the record: a copy of which no event tells has a test of its own.
          const Call call = i % 3 == 0 ? Call::kCopy : i % 3 == 1 ? Call::kQuery : Call::kSynchronize;
          unlucky.fail_at(call, i / 3 % 3);
          try {
            batches.back().copy(rig.ring, rig.pool, unlucky);
          } catch (const DeviceError&) {
          }
        }
        rig.device.finish();  // before the memory of its batches goes
      });
      for (std::size_t caller = 0; caller < 2; ++caller) {
        threads.emplace_back([&, caller] {
          std::vector<Batch> batches;
          for (std::size_t i = 0; i < 6; ++i) {
            batches.emplace_back(caller * 10 + i);
            batches.back().add(3 * kLargePiece + i);
          }
          copy_and_check(rig, batches, rig.stream);
        });
      }
      for (auto& thread : threads) thread.join();
      rig.check_whole();
    }
  }
}

}  // namespace
}  // namespace gpuprefetch

int main() {
  using namespace gpuprefetch;
  Watchdog watchdog(std::chrono::seconds(120));
  RUN(a_copy_that_fails_by_the_ring_too_is_an_error);
  RUN(no_piece_is_lost_where_memory_runs_out);
  RUN(no_thread_goes_on_where_memory_runs_out);
  RUN(one_call_fails_in_the_middle_of_a_batch);
  RUN(one_copy_fails_in_the_middle_of_a_pack);
  RUN(a_failed_record_is_settled);
  RUN(others_go_on_while_one_caller_fails);
}
