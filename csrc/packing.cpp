#include "packing.h"

#include <map>

namespace gpuprefetch {
namespace {

bool is_small(const Leaf& leaf) { return leaf.bytes > 0 && leaf.bytes <= kSmallLeafBytes; }

}  // namespace

std::size_t Layout::bytes() const {
  std::size_t sum = 0;
  for (const auto& storage : storages) sum += storage.bytes;
  return sum;
}

Layout lay_out(const std::vector<Leaf>& leaves) {
  Layout layout;
  layout.places.reserve(leaves.size());
  std::map<int, std::size_t> small_leaves;  // of a dtype
  for (const auto& leaf : leaves) small_leaves[leaf.dtype] += is_small(leaf) ? 1 : 0;
  std::map<int, std::size_t> open;  // the pack that leaves of a dtype go to
  for (const auto& leaf : leaves) {
    const bool packed = is_small(leaf) && small_leaves[leaf.dtype] >= kLeastPackedLeaves;
    const auto pack = packed ? open.find(leaf.dtype) : open.end();
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
    if (packed) open[leaf.dtype] = layout.storages.size();
    layout.places.push_back({layout.storages.size(), 0});
    layout.storages.push_back({leaf.bytes, 1});
  }
  return layout;
}

}  // namespace gpuprefetch
