// How a batch is cut for its way through the ring. Standard library only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "memcpy_pool.h"
#include "staged_copy.h"

namespace gpuprefetch {

// Each run costs the host its calls and the bus some microseconds, however short it is.
inline constexpr std::size_t kLeastRun = 256 << 10;
inline constexpr std::size_t kRunsABatch = 16;
inline constexpr std::size_t kRunStep = 4 << 10;  // so that copies begin at whole pages of their destination
// What is shorter takes about as long as to wake a thread for it.
inline constexpr std::size_t kLeastPart = 128 << 10;

// The shortest run that is worth its cost where `threads` fill a part each of it.
constexpr std::size_t least_run(std::size_t threads) { return (std::max)(threads * kLeastPart, kLeastRun); }

// Greatest length of the run that begins behind `done` of a batch's `total` bytes. The bus has nothing to do before the
// first run is filled, nor the threads once the last one is: so the first is the shortest, later ones are as long as
// all before them, and none is longer than a small share of the batch, but where that is less than the shortest.
constexpr std::size_t run_bytes(std::size_t done, std::size_t total, std::size_t piece_bytes, std::size_t threads) {
  const std::size_t share = (std::min)(done, total / kRunsABatch) / kRunStep * kRunStep;
  return (std::min)((std::max)(share, least_run(threads)), piece_bytes);
}

// What each thread fills of a run, equal parts of it: all of them are at the oldest run. If each filled one of its own,
// they would all be done together, and the bus would have nothing to do until then.
constexpr std::size_t part_bytes(std::size_t run, std::size_t threads) {
  const std::size_t parts = (std::max)((std::min)(threads, run / kLeastPart), std::size_t{1});
  return ((run + parts - 1) / parts + kRunStep - 1) / kRunStep * kRunStep;
}

// What one call copies.
struct Run {
  std::byte* from = nullptr;  // in a piece of the ring
  std::byte* to = nullptr;
  std::size_t bytes = 0;
  MemcpyPool::Job job;  // that fills it
};

// Walks over one destination, and tells which host bytes it is made of.
class Extents {
 public:
  Extents() = default;
  explicit Extents(const Destination& destination) : destination_(&destination) {}

  // Calls `each(extent)` for all that lies before `end`, in order, from where the last call ended. Its `from` is
  // nullptr for zeros.
  template <typename Each>
  void take(std::size_t end, Each each) {
    while (begin_ < end) {
      const std::vector<Extent>& extents = destination_->extents;
      const std::size_t first = extent_ < extents.size() ? extents[extent_].offset : end;
      if (begin_ < first) {
        const std::size_t gap_end = (std::min)(first, end);
        each(Extent{nullptr, begin_, gap_end - begin_});
        begin_ = gap_end;
        continue;
      }
      const Extent& extent = extents[extent_];
      const std::size_t extent_end = extent.offset + extent.row_bytes * extent.rows;
      const std::size_t last = (std::min)(extent_end, end);
      while (begin_ < last) {
        const Extent next = next_rows(extent, last);
        each(next);
        begin_ += next.row_bytes * next.rows;
      }
      if (begin_ == extent_end) ++extent_;
    }
  }

 private:
  // What begins at begin_ and ends at `last` or before it: whole rows, or a part of one.
  Extent next_rows(const Extent& extent, std::size_t last) const {
    const std::size_t row = (begin_ - extent.offset) / extent.row_bytes;
    const std::size_t in_row = (begin_ - extent.offset) % extent.row_bytes;
    const std::byte* from = extent.from + row * extent.stride + in_row;
    const std::size_t whole = in_row == 0 ? (last - begin_) / extent.row_bytes : 0;
    if (whole > 0) return {from, begin_, extent.row_bytes, whole, extent.stride};
    return {from, begin_, (std::min)(extent.row_bytes - in_row, last - begin_)};
  }

  const Destination* destination_ = nullptr;
  std::size_t begin_ = 0;
  std::size_t extent_ = 0;
};

// Cuts destinations into runs, in order, for `threads` (at least one) that fill them.
class Cutter {
 public:
  Cutter(const std::vector<Destination>& destinations, std::size_t piece_bytes, std::size_t threads)
      : next_(destinations.begin()), end_(destinations.end()), piece_bytes_(piece_bytes), threads_(threads) {
    for (const auto& destination : destinations) total_ += destination.bytes;
    open_next();
  }

  bool empty() const { return next_ == end_; }

  // Length of the next run, and what it may be cut short to.
  std::size_t bytes() const {
    return (std::min)(run_bytes(done_, total_, piece_bytes_, threads_), next_->bytes - begin_);
  }
  std::size_t least_bytes() const { return least_run(threads_); }

  // The next run, of `bytes`, for staging at `from`.
  Run cut(std::size_t bytes, std::byte* from) {
    Run run{from, next_->to + begin_, bytes, {}};
    const std::size_t part = part_bytes(bytes, threads_);
    run.job.parts.resize((bytes + part - 1) / part);
    const std::size_t first = begin_;
    begin_ += bytes;
    done_ += bytes;
    std::size_t end = first;
    for (auto& copies : run.job.parts) {
      end = (std::min)(end + part, begin_);
      extents_.take(end, [&](const Extent& rows) {
        copies.push_back({from + (rows.offset - first), rows.from, rows.row_bytes, rows.rows, rows.stride});
      });
    }
    if (begin_ == next_->bytes) {
      ++next_;
      open_next();
    }
    return run;
  }

 private:
  void open_next() {
    while (next_ != end_ && next_->bytes == 0) ++next_;
    begin_ = 0;
    if (next_ != end_) extents_ = Extents(*next_);
  }

  std::vector<Destination>::const_iterator next_;
  const std::vector<Destination>::const_iterator end_;
  const std::size_t piece_bytes_;
  const std::size_t threads_;
  Extents extents_;        // of *next_
  std::size_t begin_ = 0;  // in *next_
  std::size_t done_ = 0;
  std::size_t total_ = 0;
};

}  // namespace gpuprefetch
