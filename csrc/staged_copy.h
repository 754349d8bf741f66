// One batch from host memory to the device, as a rule streamed through the pinned ring. Standard library only.
#pragma once

#include <cstddef>
#include <vector>

#include "copy_engine.h"
#include "memcpy_pool.h"
#include "pinned_ring.h"

namespace gpuprefetch {

// Rows of host bytes, `stride` bytes apart, that belong one behind the other at `offset` of their destination.
struct Extent {
  const std::byte* from;
  std::size_t offset;
  std::size_t row_bytes;
  std::size_t rows = 1;
  std::size_t stride = 0;
};

// A stretch of device memory and the host bytes it is made of: extents in ascending order, not overlapping. Bytes that
// no extent covers become zero, so that nobody gets to see what memory held before.
struct Destination {
  std::byte* to;
  std::size_t bytes;
  std::vector<Extent> extents;
};

// Queues the copies of all destinations. At return every source has been read; the copies may still be under way.
// Destinations are cut into runs (see runs.h); a piece holds as many as fit. While one is on the bus the pool fills the
// next, all its threads the oldest first; they are submitted in order.
// An exception of the engine leaves the ring whole: no piece is lost and no thread still reads a source.
void staged_copy(const std::vector<Destination>& destinations, PinnedRing& ring, MemcpyPool& pool, CopyEngine& engine);

// Queues the copies of all destinations, each extent from where it lies. Pinned sources are read some time before an
// event recorded afterwards is done.
void direct_copy(const std::vector<Destination>& destinations, CopyEngine& engine);

// Queues the copies of a batch: of `pinned` sources from where they lie, of the others through the ring. What the
// engine refuses to copy from where it lies goes through the ring too: memory that another library pinned may end
// within a tensor, and the driver takes no range that is pinned in part. Without a ring all is copied from where it
// lies. True if the bus may still read sources at return, until an event recorded afterwards is done.
bool copy_batch(std::vector<Destination> pinned, std::vector<Destination> others, PinnedRing* ring, MemcpyPool& pool,
                CopyEngine& engine);

}  // namespace gpuprefetch
