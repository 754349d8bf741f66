// staged_copy: every byte of every size arrives, in order, and sources are free at return.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "counted_allocations.h"
#include "runs.h"
#include "simulated_device.h"
#include "staged_copy.h"
#include "staged_rig.h"

namespace gpuprefetch {
namespace {

void sizes_around_a_piece() {
  on_every_rig([](Rig& rig) {
    std::vector<Batch> batches;
    batches.emplace_back(0);  // without any destination
    batches.emplace_back(1);  // every size in one batch
    for (std::size_t bytes : telling_sizes(rig.ring.piece_bytes())) {
      batches[1].add(bytes);
      batches.emplace_back(batches.size());
      batches.back().add(bytes);
    }
    copy_and_check(rig, batches, rig.stream);
  });
}

void many_destinations() {
  on_every_rig([](Rig& rig) {
    std::vector<Batch> batches;
    batches.emplace_back(1);
    for (std::size_t i = 0; i < 200; ++i) batches[0].add(i % 7 == 0 ? 0 : 1 + i * 37 % 700);
    copy_and_check(rig, batches, rig.stream);
  });
}

void sixty_four_samples_gathered() {
  on_every_rig([](Rig& rig) {
    const std::size_t piece = rig.ring.piece_bytes();
    std::vector<Batch> batches;
    for (std::size_t sample : {piece / 64, piece / 10 + 1}) {  // dense, across piece borders
      batches.emplace_back(batches.size());
      batches.back().add(Sizes(64, sample), Sizes(64, 0));
    }
    Sizes gaps;
    for (std::size_t i = 0; i < 64; ++i) gaps.push_back(i % 3 * (piece / 9) + (i == 40 ? 2 * piece : 0));
    batches.emplace_back(4);
    batches.back().add(Sizes(64, piece / 10 + 1), gaps);
    batches.back().add_gap(3 * piece);
    copy_and_check(rig, batches, rig.stream);
  });
}

// Short ones, of which a run has many, and those that runs end within; some read more than once.
void rows() {
  on_every_rig([](Rig& rig) {
    const std::size_t piece = rig.ring.piece_bytes();
    std::vector<Batch> batches;
    for (std::size_t row_bytes : {std::size_t{1}, std::size_t{48}, piece / 3, piece, 2 * piece + 5}) {
      const std::size_t count = 2 * piece / row_bytes + 3;
      for (std::size_t stride : {std::size_t{0}, row_bytes / 2, row_bytes, row_bytes + 7}) {
        batches.emplace_back(batches.size());
        batches.back().add_rows(row_bytes, count, stride, batches.size() % 2 * 40);
      }
    }
    for (std::size_t count : {0, 1, 3}) {
      batches.emplace_back(batches.size());
      batches.back().add_rows(0, count, 5, 0);
      batches.back().add_rows(9, count, 11, 0);
      batches.back().add(100);
    }
    copy_and_check(rig, batches, rig.stream);
  });
}

// Whatever the ring held before, and whether a piece holds many leaves or a leaf many pieces.
void packs_of_one_and_many_leaves() {
  on_every_rig([](Rig& rig) {
    std::vector<Batch> batches;
    for (const Sizes& leaves : {Sizes{1}, Sizes(64, 4096), Sizes(200, 1), Sizes(3, 0), Sizes{8, 0, 513, 512, 0, 7}}) {
      batches.emplace_back(batches.size());
      batches.back().add_pack(leaves);
    }
    batches.emplace_back(batches.size());
    batches.back().add_pack(Sizes(20, 5000));
    batches.back().add(3 * rig.ring.piece_bytes() + 1);
    batches.back().add_pack(Sizes(100, 24));
    copy_and_check(rig, batches, rig.stream);
  });
}

// If a run can hold it.
void a_pack_is_one_copy() {
  Rig rig(2, kLeastRun, 2, Pace::kRandom);
  Batch batch(1);
  batch.add_pack(Sizes(64, 4000));
  batch.add_pack(Sizes(3, 8));
  Counting engine(rig.stream);
  batch.copy(rig.ring, rig.pool, engine);
  rig.check_whole();
  CHECK(batch.arrived());
  CHECK(engine.lengths == (Sizes{63 * 4096 + 4000, 2 * 512 + 8}));
}

// Their length is a share of the whole batch, not of a destination, at whose end one ends early.
void runs_grow_to_a_share_of_the_batch() {
  for (int threads : {0, 4}) {
    const std::size_t least = least_run(threads == 0 ? 1 : 4), large = kRunsABatch * least, pack = 60 * 4096;
    Rig rig(3, 4 * least, threads, Pace::kRandom);
    Batch batch(1);
    batch.add(large + least);
    batch.add_pack(Sizes(60, 4096));
    batch.add(large + 77);
    Counting engine(rig.stream);
    batch.copy(rig.ring, rig.pool, engine);
    rig.check_whole();
    CHECK(batch.arrived());
    const std::size_t share = (2 * large + least + pack + 77) / kRunsABatch / kRunStep * kRunStep;
    CHECK_GE(share, 2 * least + kRunStep);
    const auto& lengths = engine.lengths;
    CHECK_EQ(lengths.at(0), least);
    CHECK_EQ(lengths.at(1), least);
    CHECK_EQ(lengths.at(2), 2 * least);
    CHECK_EQ(*std::max_element(lengths.begin(), lengths.end()), share);
    CHECK_GE(std::count(lengths.begin(), lengths.end(), share), 6);
    CHECK_EQ(std::count(lengths.begin(), lengths.end(), pack), 1);
  }
}

// What one thread fills of a run ends within a row and within a gap.
void parts_of_a_run() {
  for (int threads : {0, 3}) {
    Rig rig(3, 3 * kLeastRun, threads, Pace::kRandom);
    std::vector<Batch> batches;
    batches.emplace_back(1);
    batches.back().add_rows(5000, 800, 5003, kLeastRun + 9);
    batches.back().add(Sizes(9, kLeastRun / 2 + 7), Sizes(9, kLeastRun / 3));
    batches.back().add_gap(4 * kLeastRun);
    copy_and_check(rig, batches, rig.stream);
  }
}

void without_a_ring_extents_and_gaps_are_copied_one_by_one() {
  for (Pace pace : {Pace::kRandom, Pace::kLate}) {
    for (std::size_t seed = 0; seed < 10; ++seed) {
      current_case = static_cast<std::int64_t>(seed);
      Rig rig(1, kSmallPiece, 0, pace, seed + 1);
      Batch batch = random_batch(seed, 2000);
      batch.add_pack(Sizes{8, 0, 513, 512, 7});
      direct_copy(batch.destinations(), rig.stream);
      rig.device.finish();
      CHECK(batch.arrived());
    }
  }
}

// Another library may have pinned memory that ends within a tensor, begins in it, or has a hole there.
void memory_that_is_pinned_in_part_goes_through_the_ring() {
  constexpr std::size_t kThird = 100'000;
  for (int pinned_thirds = 0; pinned_thirds < 8; ++pinned_thirds) {
    for (bool has_ring : {true, false}) {
      current_case = pinned_thirds;
      Rig rig(2, kLargePiece, 2, Pace::kRandom);
      Batch batch(1);
      batch.add(3 * kThird);
      batch.add(kThird);
      const std::byte* source = batch.destinations().front().extents.front().from;
      if (pinned_thirds == 7) rig.device.pin(source, 3 * kThird);
      for (int third = 0; third < 3; ++third) {
        if ((pinned_thirds >> third & 1) != 0) rig.device.pin(source + third * kThird, kThird);
      }
      const bool refused = pinned_thirds != 0 && pinned_thirds != 7;
      PinnedRing* ring = has_ring ? &rig.ring : nullptr;
      const bool failed = throws<DeviceError>(
          [&] { CHECK(copy_batch({batch.destinations()[0]}, {batch.destinations()[1]}, ring, rig.pool, rig.stream)); });
      rig.check_whole();
      CHECK_EQ(failed, refused && !has_ring);
      CHECK_EQ(batch.arrived(), !failed);
    }
  }
}

void random_extents_equal_a_plain_copy() {
  std::size_t seed = 0;
  on_every_rig([&seed](Rig& rig) {
    const int rounds = rig.ring.piece_bytes() == kSmallPiece ? 12 : 4;
    for (int round = 0; round < rounds; ++round) {
      std::vector<Batch> batches;
      for (int i = 0; i < 3; ++i) batches.push_back(random_batch(++seed, rig.ring.piece_bytes()));
      copy_and_check(rig, batches, rig.stream);
    }
  });
}

void a_pool_that_has_been_shut_down_still_copies() {
  for (Pace pace : {Pace::kRandom, Pace::kLate}) {
    Rig rig(3, kLargePiece, 2, pace);
    rig.pool.shutdown();
    std::vector<Batch> batches;
    for (std::size_t seed : {5, 6, 7}) batches.push_back(random_batch(seed, kLargePiece));
    copy_and_check(rig, batches, rig.stream);
    rig.check_whole();
  }
}

// A batch that fits the ring is queued without any wait, also while the device stands still.
void a_batch_that_fits_waits_for_nothing() {
  Rig rig(4, kLargePiece, 2, Pace::kRandom);
  rig.stream.hold();
  Batch batch(1);
  batch.add(3 * kLargePiece + 5);
  batch.copy(rig.ring, rig.pool, rig.stream);
  rig.stream.let_go();
  rig.check_whole();
  CHECK(batch.arrived());
}

// Nor does what a leaf's end leaves of a piece stay empty.
void leaves_longer_than_a_piece_share_pieces() {
  for (int threads : {0, 2}) {
    const std::size_t piece = 8 * kLeastRun;
    Rig rig(7, piece, threads, Pace::kRandom);
    rig.stream.hold();
    Batch batch(1);
    batch.add(Sizes(6, 9 * kLeastRun), Sizes(6, 0));
    batch.copy(rig.ring, rig.pool, rig.stream);
    rig.stream.let_go();
    rig.check_whole();
    CHECK(batch.arrived());
  }
}

// Nor do short runs make it take more of the ring than its bytes: what is behind it must not wait for the copy engine.
void runs_share_pieces() {
  for (int threads : {0, 2}) {
    Rig rig(3, 8 * kLeastRun, threads, Pace::kRandom);
    rig.stream.hold();
    Batch batch(1);
    batch.add(14 * kLeastRun);
    batch.copy(rig.ring, rig.pool, rig.stream);
    Batch small(2);
    for (int i = 0; i < 40; ++i) small.add(1000);
    small.copy(rig.ring, rig.pool, rig.stream);
    rig.stream.let_go();
    rig.check_whole();
    CHECK(batch.arrived());
    CHECK(small.arrived());
  }
}

// Passes everything on, and checks that destinations are written from their beginning to their end.
class InOrder : public Forwarding {
 public:
  InOrder(CopyEngine& engine, const std::byte* begin) : Forwarding(engine), next_(begin) {}
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    CHECK(to == next_);
    next_ += bytes;
    Forwarding::copy(to, from, bytes);
  }

 private:
  const std::byte* next_;
};

void pieces_are_submitted_in_order() {
  on_every_rig([](Rig& rig) {
    Batch batch(1);
    batch.add(12 * rig.ring.piece_bytes() + 1);
    InOrder engine(rig.stream, batch.destinations()[0].to);
    batch.copy(rig.ring, rig.pool, engine);
    rig.device.finish();
    CHECK(batch.arrived());
  });
}

// Counts what this thread allocates between the engine's calls, from the first copy on.
class Between : public Forwarding {
 public:
  using Forwarding::Forwarding;
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    call([&] { Forwarding::copy(to, from, bytes); });
    copied_ = true;
  }
  void record(Event event) override {
    call([&] { Forwarding::record(event); });
  }
  bool query(Event event) override {
    bool done = false;
    call([&] { done = Forwarding::query(event); });
    return done;
  }
  void synchronize(Event event) override {
    call([&] { Forwarding::synchronize(event); });
  }

  std::int64_t allocated = 0;

 private:
  template <typename Make>
  void call(Make make) {
    if (copied_) allocated += allocations - last_;
    make();
    last_ = allocations;
  }

  bool copied_ = false;
  std::int64_t last_ = 0;
};

// Only a start allocates. How soon a thread has filled the first run is the system's to say, so this goes on until it
// was soon enough.
void the_first_run_is_submitted_before_the_last_is_started() {
  constexpr std::size_t kPieces = 64;
  Rig rig(kPieces, kLargePiece, 1, Pace::kRandom);
  for (std::size_t inline_bytes : {0, 100}) {  // by this thread, before those of the pool
    for (bool early = false; !early;) {
      Batch batch(1);
      batch.add(inline_bytes);
      batch.add((kPieces - 1) * kLargePiece);
      Between engine(rig.stream);
      batch.copy(rig.ring, rig.pool, engine);
      early = engine.allocated > 0;
      rig.device.finish();
      CHECK(batch.arrived());
    }
  }
}

// An engine that lies about what has run, on a device that stands still: the only way to be caught is by the bytes.
class Liar : public Forwarding {
 public:
  Liar(CopyEngine& engine, Call lie) : Forwarding(engine), lie_(lie) {}
  void record(Event event) override {
    if (lie_ != Call::kRecord) Forwarding::record(event);
  }
  bool query(Event event) override { return lie_ == Call::kQuery || Forwarding::query(event); }
  void synchronize(Event event) override {
    if (lie_ != Call::kSynchronize) Forwarding::synchronize(event);
  }

 private:
  const Call lie_;
};

void a_piece_reused_too_early_is_noticed() {
  for (Call lie : {Call::kSynchronize, Call::kQuery, Call::kRecord}) {
    current_case = static_cast<std::int64_t>(lie);
    Rig rig(2, kLargePiece, 2, Pace::kRandom);
    Liar liar(rig.stream, lie);
    Batch batch(1);
    // The first piece is waited for by acquire(), all further ones by try_acquire(): with one that lies, the other
    // must not be asked for what has not run.
    batch.add(lie == Call::kQuery ? 4 * kLargePiece : 3 * kLargePiece);
    rig.stream.hold();
    if (lie == Call::kQuery) {
      Batch first(2);
      first.add(kLargePiece);
      rig.stream.let_go();
      first.copy(rig.ring, rig.pool, rig.stream);  // leaves one unused piece at the head, so that nothing sleeps
      rig.device.finish();
      rig.stream.hold();
    }
    batch.copy(rig.ring, rig.pool, liar);
    rig.stream.let_go();
    rig.device.finish();
    CHECK(!batch.arrived());
    CHECK_GE(rig.device.overwritten(), 1);
  }
}

// Several batches at once through few pieces: nobody may wait for a piece while holding one.
void batches_stream_at_once_through_a_small_ring() {
  std::int64_t number = 0;
  for (std::size_t callers : {2, 4}) {
    for (std::size_t pieces : {1, 2}) {
      for (Pace pace : {Pace::kRandom, Pace::kLate}) {
        for (bool own_streams : {false, true}) {
          for (std::size_t piece_bytes : {kSmallPiece, kLargePiece}) {
            current_case = ++number;
            Rig rig(pieces, piece_bytes, 2, pace, static_cast<std::size_t>(number));
            std::vector<std::thread> threads;
            for (std::size_t caller = 0; caller < callers; ++caller) {
              CopyEngine* engine = own_streams ? &rig.device.make_stream() : &rig.stream;
              threads.emplace_back([=, &rig] {
                std::vector<Batch> batches;
                for (std::size_t i = 0; i < (piece_bytes == kSmallPiece ? 4 : 2); ++i) {
                  const std::size_t seed = static_cast<std::size_t>(number) * 100 + caller * 10 + i;
                  batches.push_back(random_batch(seed, piece_bytes));
                  batches.back().add((piece_bytes == kSmallPiece ? 20 : 4) * piece_bytes + i);
                }
                copy_and_check(rig, batches, *engine);
              });
            }
            for (auto& thread : threads) thread.join();
            rig.check_whole();
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace gpuprefetch

int main() {
  using namespace gpuprefetch;
  Watchdog watchdog(std::chrono::seconds(120));
  RUN(sizes_around_a_piece);
  RUN(many_destinations);
  RUN(sixty_four_samples_gathered);
  RUN(rows);
  RUN(packs_of_one_and_many_leaves);
  RUN(a_pack_is_one_copy);
  RUN(runs_grow_to_a_share_of_the_batch);
  RUN(parts_of_a_run);
  RUN(without_a_ring_extents_and_gaps_are_copied_one_by_one);
  RUN(memory_that_is_pinned_in_part_goes_through_the_ring);
  RUN(random_extents_equal_a_plain_copy);
  RUN(a_pool_that_has_been_shut_down_still_copies);
  RUN(a_batch_that_fits_waits_for_nothing);
  RUN(leaves_longer_than_a_piece_share_pieces);
  RUN(runs_share_pieces);
  RUN(pieces_are_submitted_in_order);
  RUN(the_first_run_is_submitted_before_the_last_is_started);
  RUN(a_piece_reused_too_early_is_noticed);
  RUN(batches_stream_at_once_through_a_small_ring);
}
