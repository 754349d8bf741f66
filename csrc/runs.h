// How a batch is cut for its way through the ring. Standard library only.
#pragma once

#include <algorithm>
#include <cstddef>

namespace gpuprefetch {

// Each run costs the same calls, however short it is.
inline constexpr std::size_t kLeastRun = 256 << 10;
inline constexpr std::size_t kRunShare = 4;
inline constexpr std::size_t kRunStep = 4 << 10;  // so that copies begin at whole pages of their destination

// Length of the run that begins behind `done` of a batch's `total` bytes: a share of what lies on the nearer side of
// it. With equal runs all threads of the pool would end their first one together, and the bus would have nothing to do
// until then; so it would, for its last runs, with nothing left to fill. Never more than a piece or than is left, and 0
// only where nothing is.
constexpr std::size_t run_bytes(std::size_t done, std::size_t total, std::size_t piece_bytes) {
  const std::size_t left = total - done;
  const std::size_t share = (std::min)(done, left) / kRunShare / kRunStep * kRunStep;
  return (std::min)((std::min)((std::max)(share, kLeastRun), piece_bytes), left);
}

}  // namespace gpuprefetch
