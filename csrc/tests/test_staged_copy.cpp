// staged_copy: every byte of every size arrives, sources are free at return, and errors leave ring and pool whole.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "packing.h"
#include "runs.h"
#include "simulated_device.h"
#include "staged_copy.h"

namespace {

// That many more by this thread, then one is refused. Negative: no limit.
thread_local std::int64_t allocations_left = -1;
thread_local std::int64_t allocations = 0;

// GCC would see free() where a delete is inlined, and take it for a mismatch.
void (*volatile give_back)(void*) = std::free;

}  // namespace

void* operator new(std::size_t bytes) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { give_back(memory); }
void operator delete(void* memory, std::size_t) noexcept { give_back(memory); }

namespace gpuprefetch {
namespace {

using Pace = SimulatedDevice::Pace;
using Call = SimulatedDevice::Call;
using Sizes = std::vector<std::size_t>;

constexpr std::size_t kSmallPiece = 512;
constexpr std::size_t kLargePiece = 66 << 10;  // large enough for the pool's threads to fill it

struct Rig {
  Rig(std::size_t pieces, std::size_t piece_bytes, int threads, Pace pace, std::size_t seed = 1)
      : pieces(pieces),
        memory(pieces * piece_bytes, std::byte{0xEE}),
        device(pace, seed),
        stream(device.make_stream()),
        ring(memory.data(), piece_bytes, device.make_events(static_cast<std::int64_t>(pieces))),
        pool(threads) {
    device.pin(memory.data(), memory.size());
  }

  // Everything has run, nothing was read too late, and every piece can be had.
  void check_whole() {
    std::vector<PinnedRing::Piece*> taken;
    for (std::size_t i = 0; i < pieces; ++i) taken.push_back(&ring.acquire(stream));
    CHECK(ring.try_acquire(stream) == nullptr);
    for (auto* piece : taken) ring.release(*piece, false);
    device.finish();
    CHECK_EQ(device.overwritten(), 0);
  }

  const std::size_t pieces;
  Bytes memory;
  SimulatedDevice device;
  SimulatedDevice::Stream& stream;
  PinnedRing ring;
  MemcpyPool pool;
};

// Sources, memory on the device, and what must be there in the end.
class Batch {
 public:
  explicit Batch(std::size_t seed) : seed_(seed) {}
  Batch(const Batch&) = delete;  // destinations refer to its memory
  Batch(Batch&&) = default;      // moving a vector keeps its elements where they are

  // One destination, made of extents of these sizes, each from memory of its own, with that many bytes before each.
  void add(const Sizes& extents, const Sizes& gaps) {
    Destination destination{nullptr, 0, {}};
    for (std::size_t i = 0; i < extents.size(); ++i) {
      destination.bytes += gaps[i];
      sources_.push_back(pattern(extents[i], seed_ * 1000 + sources_.size()));
      destination.extents.push_back(Extent{sources_.back().data(), destination.bytes, extents[i]});
      destination.bytes += extents[i];
    }
    add(std::move(destination));
  }
  // One destination of one extent, behind that many bytes.
  void add_rows(std::size_t row_bytes, std::size_t rows, std::size_t stride, std::size_t gap) {
    const std::size_t source_bytes = rows == 0 ? 0 : (rows - 1) * stride + row_bytes;
    sources_.push_back(pattern(source_bytes, seed_ * 1000 + sources_.size()));
    add(Destination{nullptr, gap + row_bytes * rows, {{sources_.back().data(), gap, row_bytes, rows, stride}}});
  }
  void add(std::size_t bytes) { add(Sizes{bytes}, Sizes{0}); }
  // Leaves of these sizes as lay_out() packs them.
  void add_pack(const Sizes& leaves) {
    Sizes gaps;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      gaps.push_back(i == 0 ? 0 : (kLeafAlignment - leaves[i - 1] % kLeafAlignment) % kLeafAlignment);
    }
    add(leaves, gaps);
  }
  void add_gap(std::size_t bytes) { add(Destination{nullptr, bytes, {}}); }

  const std::vector<Destination>& destinations() const { return destinations_; }

  // Copies, and gives the sources back to the allocator at once, also after an error.
  void copy(PinnedRing& ring, MemcpyPool& pool, CopyEngine& engine) {
    try {
      staged_copy(destinations_, ring, pool, engine);
    } catch (...) {
      sources_.clear();
      throw;
    }
    sources_.clear();
  }

  // Whether the device's memory is what a plain copy would have made it, and zero where no extent covers it.
  bool arrived() const { return memory_ == expected_; }

 private:
  void add(Destination destination) {
    expected_.emplace_back(destination.bytes, std::byte{0});
    for (const auto& extent : destination.extents) {
      for (std::size_t row = 0; row < extent.rows; ++row) {
        std::copy_n(extent.from + row * extent.stride, extent.row_bytes,
                    expected_.back().data() + extent.offset + row * extent.row_bytes);
      }
    }
    memory_.emplace_back(destination.bytes, std::byte{0xA5});
    destination.to = memory_.back().data();
    destinations_.push_back(std::move(destination));
  }

  const std::size_t seed_;
  std::vector<Bytes> sources_;
  std::vector<Bytes> memory_;  // the device's
  std::vector<Bytes> expected_;
  std::vector<Destination> destinations_;
};

Sizes telling_sizes(std::size_t piece) { return {0, 1, piece - 1, piece, piece + 1, 2 * piece, 7 * piece + 3}; }

// Up to four destinations, cut, gapped and gathered at random.
Batch random_batch(std::size_t seed, std::size_t piece_bytes) {
  Random random(seed);
  Batch batch(seed);
  const Sizes telling = telling_sizes(piece_bytes);
  for (std::size_t n = below(random, 5); n > 0; --n) {
    Sizes extents;
    Sizes gaps;
    const std::size_t most = below(random, 3) == 0 ? 40 : 4;
    for (std::size_t left = below(random, most); left > 0; --left) {
      const bool known = most == 4 && below(random, 2) == 0;
      extents.push_back(known ? telling[below(random, telling.size())] : below(random, 2 * piece_bytes / most + 2));
      gaps.push_back(below(random, 4) == 0 ? below(random, piece_bytes + piece_bytes / 2) : 0);
    }
    batch.add(extents, gaps);
    if (below(random, 4) == 0) batch.add_gap(below(random, 2 * piece_bytes));
    if (below(random, 3) == 0) {
      const std::size_t row_bytes = below(random, below(random, 2) == 0 ? 20 : piece_bytes + 20);
      const std::size_t stride = below(random, 4) == 0 ? 0 : row_bytes + below(random, 100);
      batch.add_rows(row_bytes, below(random, 2 * piece_bytes / (row_bytes + 1) + 3), stride, below(random, 30));
    }
  }
  return batch;
}

// Calls `test` for small and large pieces, few and several, with and without threads, on both kinds of device.
template <typename Test>
void on_every_rig(Test test) {
  std::int64_t number = 0;
  for (std::size_t piece_bytes : {kSmallPiece, kLargePiece}) {
    for (std::size_t pieces : {1, 2, 5}) {
      for (int threads : {0, 2}) {
        for (Pace pace : {Pace::kRandom, Pace::kLate}) {
          current_case = ++number;
          Rig rig(pieces, piece_bytes, threads, pace, static_cast<std::size_t>(number));
          test(rig);
          rig.check_whole();
        }
      }
    }
  }
}

void copy_and_check(Rig& rig, std::vector<Batch>& batches) {
  for (auto& batch : batches) batch.copy(rig.ring, rig.pool, rig.stream);
  rig.device.finish();
  for (const auto& batch : batches) CHECK(batch.arrived());
}

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
    copy_and_check(rig, batches);
  });
}

void many_destinations() {
  on_every_rig([](Rig& rig) {
    std::vector<Batch> batches;
    batches.emplace_back(1);
    for (std::size_t i = 0; i < 200; ++i) batches[0].add(i % 7 == 0 ? 0 : 1 + i * 37 % 700);
    copy_and_check(rig, batches);
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
    copy_and_check(rig, batches);
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
    copy_and_check(rig, batches);
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
    copy_and_check(rig, batches);
  });
}

class Forwarding : public CopyEngine {
 public:
  explicit Forwarding(CopyEngine& engine) : engine_(engine) {}
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override { engine_.copy(to, from, bytes); }
  void record(Event event) override { engine_.record(event); }
  bool query(Event event) override { return engine_.query(event); }
  void synchronize(Event event) override { engine_.synchronize(event); }

 private:
  CopyEngine& engine_;
};

class Counting : public Forwarding {
 public:
  using Forwarding::Forwarding;
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    lengths.push_back(bytes);
    Forwarding::copy(to, from, bytes);
  }

  Sizes lengths;
};

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

// The share is one of the whole batch, not of a destination.
void runs_grow_and_shrink_over_a_batch() {
  for (int threads : {0, 2}) {
    Rig rig(3, 2 * kLeastRun, threads, Pace::kRandom);
    Batch batch(1);
    batch.add(6 * kLeastRun);
    batch.add_pack(Sizes(60, 4096));
    batch.add(12 * kLeastRun + 77);
    Counting engine(rig.stream);
    batch.copy(rig.ring, rig.pool, engine);
    rig.check_whole();
    CHECK(batch.arrived());
    CHECK_EQ(engine.lengths.front(), kLeastRun);
    CHECK_LE(engine.lengths.back(), kLeastRun);
    CHECK_EQ(*std::max_element(engine.lengths.begin(), engine.lengths.end()), 2 * kLeastRun);
    std::size_t done = 0;
    const std::size_t total = 18 * kLeastRun + 60 * 4096 + 77;
    for (std::size_t length : engine.lengths) {
      CHECK_LE(length, run_bytes(done, total, 2 * kLeastRun));
      done += length;
    }
    CHECK_EQ(done, total);
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
      bool failed = false;
      try {
        PinnedRing* ring = has_ring ? &rig.ring : nullptr;
        CHECK(copy_batch({batch.destinations()[0]}, {batch.destinations()[1]}, ring, rig.pool, rig.stream));
      } catch (const DeviceError&) {
        failed = true;
      }
      rig.check_whole();
      CHECK_EQ(failed, refused && !has_ring);
      CHECK_EQ(batch.arrived(), !failed);
    }
  }
}

// A device that is lost refuses the ring as well.
void a_copy_that_fails_by_the_ring_too_is_an_error() {
  class Lost final : public Counting {
   public:
    using Counting::Counting;
    void copy(std::byte*, const std::byte*, std::size_t) override { throw DeviceError("lost"); }
  };
  Rig rig(2, kLargePiece, 2, Pace::kRandom);
  Batch batch(1);
  batch.add(3 * kLargePiece);
  Lost lost(rig.stream);
  bool failed = false;
  try {
    copy_batch(batch.destinations(), {}, &rig.ring, rig.pool, lost);
  } catch (const DeviceError&) {
    failed = true;
  }
  rig.check_whole();
  CHECK(failed);
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
    bool failed = false;
    allocations_left = k;
    try {
      staged_copy(batch.destinations(), rig.ring, rig.pool, engine);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
    rig.check_whole();
    CHECK_EQ(batch.arrived(), !failed);
    if (!failed) break;
    ++refused;
  }
  CHECK_GE(refused, 4);
}

void random_extents_equal_a_plain_copy() {
  std::size_t seed = 0;
  on_every_rig([&seed](Rig& rig) {
    const int rounds = rig.ring.piece_bytes() == kSmallPiece ? 12 : 4;
    for (int round = 0; round < rounds; ++round) {
      std::vector<Batch> batches;
      for (int i = 0; i < 3; ++i) batches.push_back(random_batch(++seed, rig.ring.piece_bytes()));
      copy_and_check(rig, batches);
    }
  });
}

void a_pool_that_has_been_shut_down_still_copies() {
  for (Pace pace : {Pace::kRandom, Pace::kLate}) {
    Rig rig(3, kLargePiece, 2, pace);
    rig.pool.shutdown();
    std::vector<Batch> batches;
    for (std::size_t seed : {5, 6, 7}) batches.push_back(random_batch(seed, kLargePiece));
    copy_and_check(rig, batches);
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
            bool failed = false;
            try {
              failing.copy(rig.ring, rig.pool, rig.stream);
            } catch (const DeviceError&) {
              failed = true;
            }
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
          bool failed = false;
          try {
            failing.copy(rig.ring, rig.pool, rig.stream);
          } catch (const DeviceError&) {
            failed = true;
          }
          CHECK(failed);
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
    bool failed = false;
    try {
      batch.copy(rig.ring, rig.pool, rig.stream);
    } catch (const DeviceError&) {
      failed = true;
    }
    CHECK(failed);
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
                  batches.back().copy(rig.ring, rig.pool, *engine);
                }
                rig.device.finish();
                for (const auto& batch : batches) CHECK(batch.arrived());
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
            batches.back().copy(rig.ring, rig.pool, rig.stream);
          }
          rig.device.finish();
          for (const auto& batch : batches) CHECK(batch.arrived());
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
  RUN(sizes_around_a_piece);
  RUN(many_destinations);
  RUN(sixty_four_samples_gathered);
  RUN(rows);
  RUN(packs_of_one_and_many_leaves);
  RUN(a_pack_is_one_copy);
  RUN(runs_grow_and_shrink_over_a_batch);
  RUN(without_a_ring_extents_and_gaps_are_copied_one_by_one);
  RUN(memory_that_is_pinned_in_part_goes_through_the_ring);
  RUN(a_copy_that_fails_by_the_ring_too_is_an_error);
  RUN(no_piece_is_lost_where_memory_runs_out);
  RUN(random_extents_equal_a_plain_copy);
  RUN(a_pool_that_has_been_shut_down_still_copies);
  RUN(a_batch_that_fits_waits_for_nothing);
  RUN(runs_share_pieces);
  RUN(pieces_are_submitted_in_order);
  RUN(the_first_run_is_submitted_before_the_last_is_started);
  RUN(a_piece_reused_too_early_is_noticed);
  RUN(one_call_fails_in_the_middle_of_a_batch);
  RUN(one_copy_fails_in_the_middle_of_a_pack);
  RUN(a_failed_record_is_settled);
  RUN(batches_stream_at_once_through_a_small_ring);
  RUN(others_go_on_while_one_caller_fails);
}
