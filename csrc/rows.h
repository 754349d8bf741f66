// The rows of a strided tensor: what of its memory lies together. Standard library only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gpuprefetch {

// A tensor as the copy of it sees it: where its elements lie, and where in dense memory they go. Strides are in
// elements.
class Rows {
 public:
  // `to_strides`: of memory without gaps or overlaps, in any order of dimensions.
  template <typename Integers>
  Rows(const Integers& sizes, const Integers& from_strides, const Integers& to_strides, std::size_t item_bytes)
      : item_bytes_(item_bytes), row_bytes_(item_bytes) {
    outer_.reserve(sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      count_ *= static_cast<std::size_t>(sizes[i]);
      if (sizes[i] != 1) outer_.push_back({sizes[i], from_strides[i], to_strides[i]});
    }
    std::sort(outer_.begin(), outer_.end(),
              [](const Dimension& one, const Dimension& other) { return one.to_stride > other.to_stride; });
    while (count_ > 0 && !outer_.empty() && outer_.back().from_stride == outer_.back().to_stride) {
      row_bytes_ *= static_cast<std::size_t>(outer_.back().size);
      count_ /= static_cast<std::size_t>(outer_.back().size);
      outer_.pop_back();
    }
    for (std::size_t i = outer_.size(); i-- > 1;) {  // two that one step walks over are one
      const Dimension inside = outer_[i];
      Dimension& outside = outer_[i - 1];
      if (outside.from_stride != inside.from_stride * inside.size) continue;
      outside = {outside.size * inside.size, inside.from_stride, inside.to_stride};
      outer_.erase(outer_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  std::size_t count() const { return count_; }
  std::size_t row_bytes() const { return row_bytes_; }
  std::size_t blocks() const { return count_ == 0 ? 0 : count_ / static_cast<std::size_t>(in_block().size); }

  // Calls `block(from, rows, stride)` for all rows, in the order in which they lie in dense memory, one behind the
  // other. `from`: where the first of them begins, in bytes behind the tensor's first element; the others follow
  // `stride` bytes apart.
  template <typename Block>
  void each_block(Block block) const {
    const Dimension inner = in_block();
    std::vector<std::int64_t> index(outer_.empty() ? 0 : outer_.size() - 1, 0);
    std::int64_t from = 0;  // in elements
    for (std::size_t n = blocks(); n > 0; --n) {
      block(static_cast<std::size_t>(from) * item_bytes_, static_cast<std::size_t>(inner.size),
            static_cast<std::size_t>(inner.from_stride) * item_bytes_);
      for (std::size_t i = index.size(); i-- > 0;) {
        from += outer_[i].from_stride;
        if (++index[i] < outer_[i].size) break;
        from -= outer_[i].from_stride * outer_[i].size;
        index[i] = 0;
      }
    }
  }

 private:
  struct Dimension {
    std::int64_t size, from_stride, to_stride;
  };

  Dimension in_block() const { return outer_.empty() ? Dimension{1, 0, 0} : outer_.back(); }

  std::size_t item_bytes_;
  std::size_t row_bytes_;
  std::size_t count_ = 1;
  std::vector<Dimension> outer_;  // that a row does not span, the one with the longest steps first
};

}  // namespace gpuprefetch
