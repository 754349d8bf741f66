// Which leaves of a batch share a storage on the device. Standard library only.
#pragma once

#include <cstddef>
#include <vector>

namespace gpuprefetch {

// Leaves of up to this size share storages: each on its own would cost a run through the ring, a call of the driver and
// one of the allocator.
inline constexpr std::size_t kSmallLeafBytes = 128 << 10;

// Shared storages ("packs") stay small, since a kept leaf keeps all of its own alive.
inline constexpr std::size_t kPackBytes = 256 << 10;

// Fewer small leaves of a dtype than these are left alone: sharing would save little, and what acts on storages (a kept
// label, resize_, deepcopy) shall find ordinary tensors in ordinary batches.
inline constexpr std::size_t kLeastPackedLeaves = 8;

// As torch's own allocations begin.
inline constexpr std::size_t kLeafAlignment = 512;

struct Leaf {
  std::size_t bytes;
  int dtype;  // any number that tells dtypes apart
};

struct Layout {
  struct Place {
    std::size_t storage;
    std::size_t offset;  // in bytes
  };
  struct Storage {
    std::size_t bytes;   // to the end of its last leaf
    std::size_t leaves;  // with one it is an ordinary tensor's
  };

  std::vector<Place> places;  // of each leaf, in their order; offsets in a storage ascend
  std::vector<Storage> storages;

  std::size_t bytes() const;
};

// Small leaves of a dtype that has enough of them go together, in order, as many as fit a pack; all others, empty ones
// too, alone.
Layout lay_out(const std::vector<Leaf>& leaves);

}  // namespace gpuprefetch
