// Copies from host memory to host memory. Standard library only.
#pragma once

#include <cstddef>
#include <vector>

namespace gpuprefetch {

// Rows that lie one behind the other at `to`, and `stride` bytes apart at `from`. nullptr: zeros.
struct HostCopy {
  std::byte* to;
  const std::byte* from;
  std::size_t row_bytes;
  std::size_t rows = 1;
  std::size_t stride = 0;
};

// One after another. Long ones go past the cache where the processor can: no processor will read what is staged.
void copy_on_host(const std::vector<HostCopy>& copies);

}  // namespace gpuprefetch
