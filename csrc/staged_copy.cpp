#include "staged_copy.h"

#include <algorithm>
#include <deque>

namespace gpuprefetch {
namespace {

// Up to this a copy takes no longer than waking a thread: it is done by finish().
constexpr std::size_t kInlineBytes = 64 << 10;

struct Fill {
  PinnedRing::Piece* piece;
  std::byte* to;
  std::size_t bytes;
  MemcpyPool::Job job;
};

// Cuts destinations into runs of at most one piece, in order.
class Cutter {
 public:
  Cutter(const std::vector<Destination>& destinations, std::size_t piece_bytes)
      : destinations_(destinations), piece_bytes_(piece_bytes) {
    skip_finished();
  }

  bool empty() const { return destination_ == destinations_.size(); }

  // Describes the next run: where it goes, and which host bytes make it up once they lie in `piece`.
  void cut(Fill& fill) {
    const Destination& destination = destinations_[destination_];
    const std::size_t end = (std::min)(begin_ + piece_bytes_, destination.bytes);
    fill.to = destination.to + begin_;
    fill.bytes = end - begin_;
    while (extent_ < destination.extents.size()) {
      const Extent& extent = destination.extents[extent_];
      const std::size_t first = (std::max)(extent.offset, begin_);
      const std::size_t last = (std::min)(extent.offset + extent.bytes, end);
      if (first < last) {
        fill.job.copies.push_back(
            {fill.piece->data + (first - begin_), extent.from + (first - extent.offset), last - first});
      }
      if (extent.offset + extent.bytes > end) break;  // goes on in the next run
      ++extent_;
    }
    begin_ = end;
    skip_finished();
  }

 private:
  void skip_finished() {
    while (!empty() && begin_ == destinations_[destination_].bytes) {
      ++destination_;
      begin_ = 0;
      extent_ = 0;
    }
  }

  const std::vector<Destination>& destinations_;
  const std::size_t piece_bytes_;
  std::size_t destination_ = 0;
  std::size_t begin_ = 0;
  std::size_t extent_ = 0;
};

// The pieces being filled, oldest first. Its end, in whatever way it comes, returns every piece unused.
class Filling {
 public:
  Filling(PinnedRing& ring, MemcpyPool& pool) : ring_(ring), pool_(pool) {}
  Filling(const Filling&) = delete;
  Filling& operator=(const Filling&) = delete;
  ~Filling() {
    for (auto& fill : fills_) {
      pool_.cancel(fill.job);
      ring_.release(*fill.piece, false);
    }
  }

  bool empty() const { return fills_.empty(); }

  void start(PinnedRing::Piece& piece, Cutter& cutter) {
    fills_.push_back(Fill{&piece, nullptr, 0, {}});  // a deque: the pool keeps the job's address
    Fill& fill = fills_.back();
    cutter.cut(fill);
    if (fill.bytes > kInlineBytes) pool_.start(fill.job);
  }

  void submit_oldest(CopyEngine& engine) {
    Fill& fill = fills_.front();
    pool_.finish(fill.job);
    try {
      engine.copy(fill.to, fill.piece->data, fill.bytes);
      engine.record(fill.piece->event);
    } catch (...) {
      // The copy may have been queued all the same, and then reads the piece that is about to be given back.
      settle(engine, fill.piece->event);
      throw;
    }
    ring_.release(*fill.piece, true);
    fills_.pop_front();
  }

 private:
  PinnedRing& ring_;
  MemcpyPool& pool_;
  std::deque<Fill> fills_;
};

}  // namespace

void staged_copy(const std::vector<Destination>& destinations, PinnedRing& ring, MemcpyPool& pool, CopyEngine& engine) {
  Cutter cutter(destinations, ring.piece_bytes());
  Filling filling(ring, pool);
  while (!cutter.empty() || !filling.empty()) {
    while (!cutter.empty()) {
      // Only empty-handed may one wait for a piece; see PinnedRing.
      PinnedRing::Piece* piece = filling.empty() ? &ring.acquire(engine) : ring.try_acquire(engine);
      if (piece == nullptr) break;
      filling.start(*piece, cutter);
    }
    filling.submit_oldest(engine);
  }
}

}  // namespace gpuprefetch
