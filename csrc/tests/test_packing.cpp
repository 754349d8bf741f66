// lay_out: small leaves of one dtype share small storages, and nothing else shares any.
#include <chrono>
#include <cstddef>
#include <map>
#include <set>
#include <vector>

#include "check.h"
#include "packing.h"

namespace gpuprefetch {
namespace {

using Leaves = std::vector<Leaf>;

// What holds for every layout. The numbers beside it are those of the test's own.
void check_sound(const Leaves& leaves, const Layout& layout) {
  CHECK_EQ(layout.places.size(), leaves.size());
  std::map<std::size_t, Leaves> by_storage;
  std::map<std::size_t, std::size_t> ends;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const auto& place = layout.places[i];
    CHECK_EQ(place.offset % kLeafAlignment, 0);
    CHECK_GE(place.offset, ends[place.storage]);
    CHECK_LE(place.offset, ends[place.storage] + kLeafAlignment - 1);
    ends[place.storage] = place.offset + leaves[i].bytes;
    by_storage[place.storage].push_back(leaves[i]);
  }
  CHECK_EQ(by_storage.size(), layout.storages.size());
  for (const auto& [number, inside] : by_storage) {
    const auto& storage = layout.storages[number];
    CHECK_EQ(storage.leaves, inside.size());
    CHECK_EQ(storage.bytes, ends[number]);
    bytes += storage.bytes;
    if (inside.size() == 1) continue;
    CHECK_LE(storage.bytes, kPackBytes);
    for (const auto& leaf : inside) {
      CHECK_EQ(leaf.dtype, inside.front().dtype);
      CHECK_LE(leaf.bytes, kSmallLeafBytes);
      CHECK_GE(leaf.bytes, 1);
    }
  }
  CHECK_EQ(layout.bytes(), bytes);
}

Layout sound(const Leaves& leaves) {
  const Layout layout = lay_out(leaves);
  check_sound(leaves, layout);
  return layout;
}

// `leaves`, and enough tiny ones of `dtype` behind them for those to be packed.
Leaves with_company(Leaves leaves, int dtype = 6) {
  leaves.insert(leaves.end(), kLeastPackedLeaves, {1, dtype});
  return leaves;
}

void no_leaves() { CHECK_EQ(sound({}).storages.size(), 0); }

void a_single_leaf_is_ordinary() {
  for (std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{513}, kSmallLeafBytes, 40 * kPackBytes}) {
    const Layout layout = sound({{bytes, 6}});
    CHECK_EQ(layout.storages.size(), 1);
    CHECK_EQ(layout.bytes(), bytes);
  }
}

void two_hundred_leaves_of_four_kibibytes_are_four_packs() {
  const Layout layout = sound(Leaves(200, {4096, 6}));
  CHECK_EQ(layout.storages.size(), 4);
  CHECK_EQ(layout.bytes(), 200 * 4096);
}

void few_leaves_are_left_alone() {
  CHECK_EQ(sound(Leaves(kLeastPackedLeaves - 1, {8, 6})).storages.size(), kLeastPackedLeaves - 1);
  CHECK_EQ(sound(Leaves(kLeastPackedLeaves, {8, 6})).storages.size(), 1);
  Leaves leaves(kLeastPackedLeaves - 1, {8, 6});
  leaves.insert(leaves.end(), 2 * kLeastPackedLeaves, {kSmallLeafBytes + 1, 6});  // these don't count,
  leaves.insert(leaves.end(), 2 * kLeastPackedLeaves, {0, 6});                    // nor these
  leaves.insert(leaves.end(), kLeastPackedLeaves, {8, 4});                        // nor these, which are a pack
  CHECK_EQ(sound(leaves).storages.size(), leaves.size() - kLeastPackedLeaves + 1);
}

void a_pack_is_filled_to_its_last_byte() {
  const std::size_t pack = kPackBytes / kSmallLeafBytes;
  const std::size_t packs = kLeastPackedLeaves;  // enough, whatever a pack holds
  CHECK_EQ(sound(Leaves(packs * pack, {kSmallLeafBytes, 6})).storages.size(), packs);
  CHECK_EQ(sound(Leaves(packs * pack + 1, {kSmallLeafBytes, 6})).storages.size(), packs + 1);
  Leaves leaves(packs * pack - 1, {kSmallLeafBytes, 6});
  leaves.push_back({kSmallLeafBytes - kLeafAlignment, 6});
  leaves.push_back({kLeafAlignment, 6});
  CHECK_EQ(sound(leaves).storages.size(), packs);
  leaves.back().bytes += 1;
  CHECK_EQ(sound(leaves).storages.size(), packs + 1);
}

void large_and_empty_leaves_stay_alone() {
  const Layout layout =
      sound(with_company({{8, 6}, {kSmallLeafBytes + 1, 6}, {0, 6}, {8, 6}, {0, 6}, {kSmallLeafBytes + 1, 6}}));
  CHECK_EQ(layout.storages.size(), 5);
  CHECK_EQ(layout.places[0].storage, layout.places[3].storage);
  CHECK_EQ(layout.places[3].offset, kLeafAlignment);
}

void each_dtype_has_packs_of_its_own() {
  const Layout layout = sound(with_company(with_company({{8, 6}, {8, 4}, {8, 6}, {8, 4}, {8, 0}}, 4), 6));
  CHECK_EQ(layout.storages.size(), 3);
  CHECK_EQ(layout.places[0].storage, layout.places[2].storage);
  CHECK_EQ(layout.places[1].storage, layout.places[3].storage);
  CHECK_EQ(layout.storages[layout.places[4].storage].leaves, 1);
}

void leaves_at_random() {
  for (std::int64_t seed = 0; seed < 200; ++seed) {
    current_case = seed;
    Random random(static_cast<std::size_t>(seed));
    const std::size_t most = below(random, 2) == 0 ? 2 * kSmallLeafBytes : 3000;
    Leaves leaves(below(random, 300));
    for (auto& leaf : leaves) leaf = {below(random, most), static_cast<int>(below(random, 4))};
    const Layout layout = sound(leaves);
    // Two packs of a dtype that would fit into one: at most because the later one was begun by a leaf too large.
    std::map<int, std::size_t> small, packs, count;
    std::set<std::size_t> seen;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      if (leaves[i].bytes == 0 || leaves[i].bytes > kSmallLeafBytes) continue;
      small[leaves[i].dtype] += leaves[i].bytes + kLeafAlignment;
      packs[leaves[i].dtype] += seen.insert(layout.places[i].storage).second ? 1 : 0;
      ++count[leaves[i].dtype];
    }
    for (const auto& [dtype, bytes] : small) {
      if (count[dtype] < kLeastPackedLeaves) continue;
      CHECK_LE(packs[dtype], 1 + bytes / (kPackBytes - kSmallLeafBytes));
    }
  }
}

}  // namespace
}  // namespace gpuprefetch

int main() {
  using namespace gpuprefetch;
  Watchdog watchdog(std::chrono::seconds(60));
  RUN(no_leaves);
  RUN(a_single_leaf_is_ordinary);
  RUN(two_hundred_leaves_of_four_kibibytes_are_four_packs);
  RUN(few_leaves_are_left_alone);
  RUN(a_pack_is_filled_to_its_last_byte);
  RUN(large_and_empty_leaves_stay_alone);
  RUN(each_dtype_has_packs_of_its_own);
  RUN(leaves_at_random);
}
