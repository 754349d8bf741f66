// PinnedRing: a piece is handed out when no copy reads it any more, to one holder, and none is ever lost.
#include <atomic>
#include <cstddef>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "pinned_ring.h"
#include "simulated_device.h"

namespace gpuprefetch {
namespace {

using Pace = SimulatedDevice::Pace;
using Call = SimulatedDevice::Call;

constexpr std::size_t kPieceBytes = 512;

struct Rig {
  explicit Rig(std::size_t pieces, Pace pace = Pace::kRandom, std::size_t seed = 1)
      : memory(pieces * kPieceBytes),
        device(pace, seed),
        stream(device.make_stream()),
        ring(memory.data(), kPieceBytes, device.make_events(static_cast<std::int64_t>(pieces))) {
    device.pin(memory.data(), memory.size());
  }

  // Fills a piece, queues its copy and gives it back.
  void send(PinnedRing::Piece& piece, const Bytes& bytes, Bytes& to) {
    std::memcpy(piece.data, bytes.data(), kPieceBytes);
    stream.copy(to.data(), piece.data, kPieceBytes);
    stream.record(piece.event);
    ring.release(piece, true);
  }

  // Every piece is in the ring: each can be had, once.
  void check_whole() {
    std::set<PinnedRing::Piece*> seen;
    for (std::size_t i = 0; i < memory.size() / kPieceBytes; ++i) seen.insert(&ring.acquire(stream));
    CHECK_EQ(seen.size(), memory.size() / kPieceBytes);
    CHECK(ring.try_acquire(stream) == nullptr);
    for (auto* piece : seen) ring.release(*piece, false);
  }

  Bytes memory;
  SimulatedDevice device;
  SimulatedDevice::Stream& stream;
  PinnedRing ring;
};

void pieces_cut_the_memory_and_come_first_in_first_out() {
  Rig rig(3);
  CHECK_EQ(rig.ring.piece_bytes(), kPieceBytes);
  std::vector<PinnedRing::Piece*> pieces;
  for (std::size_t i = 0; i < 3; ++i) {
    pieces.push_back(i == 1 ? rig.ring.try_acquire(rig.stream) : &rig.ring.acquire(rig.stream));
    CHECK(pieces[i] != nullptr);
    CHECK(pieces[i]->data == rig.memory.data() + i * kPieceBytes);
  }
  CHECK(rig.ring.try_acquire(rig.stream) == nullptr);
  for (std::size_t i : {2, 0, 1}) rig.ring.release(*pieces[i], false);
  for (std::size_t i : {2, 0, 1}) CHECK(&rig.ring.acquire(rig.stream) == pieces[i]);
  for (auto* piece : pieces) rig.ring.release(*piece, false);
  rig.check_whole();
}

void a_piece_given_back_unused_is_free_at_once() {
  Rig rig(1);
  rig.stream.hold();
  rig.ring.release(rig.ring.acquire(rig.stream), false);
  PinnedRing::Piece* piece = rig.ring.try_acquire(rig.stream);
  CHECK(piece != nullptr);
  rig.ring.release(*piece, false);
  rig.ring.release(rig.ring.acquire(rig.stream), false);
}

void a_piece_in_flight_is_waited_for() {
  for (Pace pace : {Pace::kRandom, Pace::kLate}) {
    Rig rig(1, pace);
    Bytes to(kPieceBytes);
    rig.stream.hold();
    rig.send(rig.ring.acquire(rig.stream), pattern(kPieceBytes, 7), to);
    for (int i = 0; i < 20; ++i) CHECK(rig.ring.try_acquire(rig.stream) == nullptr);
    std::atomic<bool> going{false};
    std::thread other([&] {
      PinnedRing::Piece& piece = rig.ring.acquire(rig.stream);
      CHECK(going);
      std::memset(piece.data, 0xFF, kPieceBytes);
      rig.ring.release(piece, false);
    });
    rig.device.await_sleepers(1);
    going = true;
    rig.stream.let_go();
    other.join();
    CHECK(to == pattern(kPieceBytes, 7));
    CHECK_EQ(rig.device.overwritten(), 0);
    rig.device.finish();
  }
}

void try_acquire_finds_a_piece_once_its_copy_has_run() {
  for (Pace pace : {Pace::kRandom, Pace::kLate}) {
    Rig rig(2, pace);
    Bytes to(kPieceBytes);
    rig.send(rig.ring.acquire(rig.stream), pattern(kPieceBytes, 1), to);
    rig.send(rig.ring.acquire(rig.stream), pattern(kPieceBytes, 2), to);
    for (int i = 0; i < 2; ++i) {
      PinnedRing::Piece* piece = nullptr;
      while (piece == nullptr) piece = rig.ring.try_acquire(rig.stream);
      CHECK(piece->data == rig.memory.data() + static_cast<std::size_t>(i) * kPieceBytes);
      std::memset(piece->data, 0xFF, kPieceBytes);
    }
    rig.device.finish();
    CHECK_EQ(rig.device.overwritten(), 0);
    CHECK(to == pattern(kPieceBytes, 2));
  }
}

// Who sleeps for the copy engine keeps nobody else out of the ring.
void a_wait_leaves_the_ring_open() {
  Rig rig(2);
  Bytes to(kPieceBytes);
  rig.stream.hold();
  rig.send(rig.ring.acquire(rig.stream), pattern(kPieceBytes, 1), to);
  PinnedRing::Piece& held = rig.ring.acquire(rig.stream);
  std::thread other([&] { rig.ring.release(rig.ring.acquire(rig.stream), false); });
  rig.device.await_sleepers(1);
  rig.ring.release(held, false);
  CHECK(rig.ring.try_acquire(rig.stream) == &held);
  rig.ring.release(held, false);
  rig.stream.let_go();
  other.join();
  rig.check_whole();
  rig.device.finish();
}

void a_piece_given_back_wakes_who_waits() {
  Rig rig(2);
  for (int round = 0; round < 300; ++round) {
    PinnedRing::Piece& first = rig.ring.acquire(rig.stream);
    PinnedRing::Piece& second = rig.ring.acquire(rig.stream);
    std::vector<std::thread> waiting;
    for (int i = 0; i < 2; ++i) {
      waiting.emplace_back([&rig] { rig.ring.release(rig.ring.acquire(rig.stream), false); });
    }
    for (int i = 0; i < round % 20; ++i) std::this_thread::yield();
    rig.ring.release(first, false);
    rig.ring.release(second, false);
    for (auto& thread : waiting) thread.join();
  }
  rig.check_whole();
}

void a_failed_wait_loses_no_piece() {
  for (Pace pace : {Pace::kRandom, Pace::kLate}) {
    Rig rig(2, pace);
    std::vector<Bytes> to(2, Bytes(kPieceBytes));
    rig.stream.hold();
    for (std::size_t i = 0; i < 2; ++i) rig.send(rig.ring.acquire(rig.stream), pattern(kPieceBytes, i), to[i]);
    for (Call call : {Call::kSynchronize, Call::kQuery}) {
      rig.stream.fail_at(call, 0);
      CHECK(throws<DeviceError>([&] {
        if (call == Call::kSynchronize) {
          rig.ring.acquire(rig.stream);
        } else {
          rig.ring.try_acquire(rig.stream);
        }
      }));
    }
    CHECK(rig.ring.try_acquire(rig.stream) == nullptr);  // still in flight, both
    rig.stream.let_go();
    for (std::size_t i = 0; i < 2; ++i) {
      PinnedRing::Piece& piece = rig.ring.acquire(rig.stream);
      std::memset(piece.data, 0xFF, kPieceBytes);
      rig.ring.release(piece, false);
    }
    rig.check_whole();
    rig.device.finish();
    CHECK_EQ(rig.device.overwritten(), 0);
    for (std::size_t i = 0; i < 2; ++i) CHECK(to[i] == pattern(kPieceBytes, i));
  }
}

void after_drain_no_copy_reads_the_memory() {
  for (Pace pace : {Pace::kRandom, Pace::kLate}) {
    Rig rig(3, pace);
    rig.ring.drain(rig.stream);  // nothing in flight: no-op
    std::vector<Bytes> to(5, Bytes(kPieceBytes));
    for (std::size_t i = 0; i < 2; ++i) rig.send(rig.ring.acquire(rig.stream), pattern(kPieceBytes, i), to[i]);
    rig.device.finish();
    rig.stream.hold();
    for (std::size_t i = 2; i < 4; ++i) rig.send(rig.ring.acquire(rig.stream), pattern(kPieceBytes, i), to[i]);
    std::atomic<bool> going{false};
    std::thread other([&] {
      rig.ring.drain(rig.stream);
      CHECK(going);
      std::memset(rig.memory.data(), 0xFF, rig.memory.size());
    });
    rig.device.await_sleepers(1);
    going = true;
    rig.stream.let_go();
    other.join();
    rig.device.finish();
    CHECK_EQ(rig.device.overwritten(), 0);
    for (std::size_t i = 0; i < 4; ++i) CHECK(to[i] == pattern(kPieceBytes, i));
    rig.send(rig.ring.acquire(rig.stream), pattern(kPieceBytes, 4), to[4]);  // the ring serves on
    rig.ring.drain(rig.stream);
    CHECK(to[4] == pattern(kPieceBytes, 4));
    rig.device.finish();
  }
}

// All members may be called from any thread: nothing but the ring orders these two.
void drain_by_another_thread() {
  for (int round = 0; round < 20; ++round) {
    Rig rig(1);
    Bytes to(kPieceBytes);
    std::atomic<bool> sent{false};
    std::thread other([&] {
      rig.send(rig.ring.acquire(rig.stream), pattern(kPieceBytes, 3), to);
      sent.store(true, std::memory_order_relaxed);
    });
    while (!sent.load(std::memory_order_relaxed)) std::this_thread::yield();
    rig.ring.drain(rig.stream);
    other.join();
    rig.device.finish();
    CHECK(to == pattern(kPieceBytes, 3));
  }
}

// Each thread holds one piece at a time, or a second one by try_acquire(); every byte is checked.
void many_threads_share_the_ring() {
  std::int64_t number = 0;
  for (std::size_t pieces : {1, 2, 5}) {
    for (Pace pace : {Pace::kRandom, Pace::kLate}) {
      current_case = ++number;
      Rig rig(pieces, pace, static_cast<std::size_t>(number));
      constexpr std::size_t kSends = 100;
      std::vector<std::vector<Bytes>> to(4, std::vector<Bytes>(kSends, Bytes(kPieceBytes)));
      std::vector<std::thread> senders;
      for (std::size_t sender = 0; sender < to.size(); ++sender) {
        senders.emplace_back([&rig, &to, sender] {
          for (std::size_t i = 0; i < kSends; ++i) {
            PinnedRing::Piece& piece = rig.ring.acquire(rig.stream);
            PinnedRing::Piece* second = rig.ring.try_acquire(rig.stream);
            rig.send(piece, pattern(kPieceBytes, sender * kSends + i), to[sender][i]);
            if (second == nullptr) continue;
            if (++i < kSends) {
              rig.send(*second, pattern(kPieceBytes, sender * kSends + i), to[sender][i]);
            } else {
              rig.ring.release(*second, false);
            }
          }
        });
      }
      for (auto& sender : senders) sender.join();
      rig.check_whole();
      rig.device.finish();
      CHECK_EQ(rig.device.overwritten(), 0);
      for (std::size_t sender = 0; sender < to.size(); ++sender) {
        for (std::size_t i = 0; i < kSends; ++i) CHECK(to[sender][i] == pattern(kPieceBytes, sender * kSends + i));
      }
    }
  }
}

}  // namespace
}  // namespace gpuprefetch

int main() {
  using namespace gpuprefetch;
  Watchdog watchdog(std::chrono::seconds(120));
  RUN(pieces_cut_the_memory_and_come_first_in_first_out);
  RUN(a_piece_given_back_unused_is_free_at_once);
  RUN(a_piece_in_flight_is_waited_for);
  RUN(try_acquire_finds_a_piece_once_its_copy_has_run);
  RUN(a_wait_leaves_the_ring_open);
  RUN(a_piece_given_back_wakes_who_waits);
  RUN(a_failed_wait_loses_no_piece);
  RUN(after_drain_no_copy_reads_the_memory);
  RUN(drain_by_another_thread);
  RUN(many_threads_share_the_ring);
}
