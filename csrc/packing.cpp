#include "packing.h"

#include <map>

namespace gpuprefetch {

std::size_t Layout::bytes() const {
  std::size_t sum = 0;
  for (const auto& storage : storages) sum += storage.bytes;
  return sum;
}

Layout lay_out(const std::vector<Leaf>& leaves) {
  Layout layout;
  layout.places.reserve(leaves.size());
  std::map<int, std::size_t> open;  // the pack that leaves of a dtype go to
  for (const auto& leaf : leaves) {
    const bool small = leaf.bytes > 0 && leaf.bytes <= kSmallLeafBytes;
    const auto pack = small ? open.find(leaf.dtype) : open.end();
    if (pack != open.end()) {
      Layout::Storage& storage = layout.storages[pack->second];
      const std::size_t offset = (storage.bytes + kLeafAlignment - 1) / kLeafAlignment * kLeafAlignment;
      if (offset + leaf.bytes <= kPackBytes) {
        layout.places.push_back({pack->second, offset});
        storage.bytes = offset + leaf.bytes;
        ++storage.leaves;
        continue;
      }
    }
    if (small) open[leaf.dtype] = layout.storages.size();
    layout.places.push_back({layout.storages.size(), 0});
    layout.storages.push_back({leaf.bytes, 1});
  }
  return layout;
}

}  // namespace gpuprefetch
