// How a batch is cut for its way through the ring. Standard library only.
#pragma once

#include <algorithm>
#include <cstddef>

namespace gpuprefetch {

// Each run costs the host its calls and the bus some microseconds, however short it is.
inline constexpr std::size_t kLeastRun = 256 << 10;
inline constexpr std::size_t kRunsABatch = 16;
inline constexpr std::size_t kRunStep = 4 << 10;  // so that copies begin at whole pages of their destination
// What is shorter takes about as long as to wake a thread for it.
inline constexpr std::size_t kLeastPart = 128 << 10;

// Length of the run that begins behind `done` of a batch's `total` bytes, of which `threads` fill a part each. The bus
// has nothing to do before the first run is filled, nor the threads once the last one is: so the first is as short as
// is worth it, later ones as long as all before them, and none longer than a small share of the batch. A piece holds
// one of the longest, or a few and no rest.
constexpr std::size_t run_bytes(std::size_t done, std::size_t total, std::size_t piece_bytes, std::size_t threads) {
  const std::size_t least = (std::max)(threads * kLeastPart, kLeastRun);
  const std::size_t share = (std::max)(total / kRunsABatch, least);
  const std::size_t runs_a_piece = (piece_bytes + share - 1) / share;
  const std::size_t longest = runs_a_piece == 1 ? piece_bytes : piece_bytes / runs_a_piece / kRunStep * kRunStep;
  return (std::min)((std::max)(done / kRunStep * kRunStep, least), longest);
}

// What each of `threads` fills of a run: all of them are at the oldest one. If each filled a run of its own, they would
// all be done together, and the bus would have nothing to do until then.
constexpr std::size_t part_bytes(std::size_t run, std::size_t threads) {
  const std::size_t share = (run + threads - 1) / threads;
  return (std::max)((share + kRunStep - 1) / kRunStep * kRunStep, kLeastPart);
}

}  // namespace gpuprefetch
