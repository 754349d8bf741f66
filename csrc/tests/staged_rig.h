// A ring, a pool and a simulated device, batches that know what must arrive, and engines that watch the way there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "check.h"
#include "memcpy_pool.h"
#include "packing.h"
#include "pinned_ring.h"
#include "simulated_device.h"
#include "staged_copy.h"

namespace gpuprefetch {

using Pace = SimulatedDevice::Pace;
using Call = SimulatedDevice::Call;
using Sizes = std::vector<std::size_t>;

inline constexpr std::size_t kSmallPiece = 512;
inline constexpr std::size_t kLargePiece = 66 << 10;  // large enough for the pool's threads to fill it

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

inline Sizes telling_sizes(std::size_t piece) { return {0, 1, piece - 1, piece, piece + 1, 2 * piece, 7 * piece + 3}; }

// Up to four destinations, cut, gapped and gathered at random.
inline Batch random_batch(std::size_t seed, std::size_t piece_bytes) {
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

inline void copy_and_check(Rig& rig, std::vector<Batch>& batches, CopyEngine& engine) {
  for (auto& batch : batches) batch.copy(rig.ring, rig.pool, engine);
  rig.device.finish();
  for (const auto& batch : batches) CHECK(batch.arrived());
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

}  // namespace gpuprefetch
