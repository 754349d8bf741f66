#include "staged_copy.h"

#include <algorithm>
#include <array>
#include <deque>
#include <iterator>
#include <utility>

#include "runs.h"

namespace gpuprefetch {
namespace {

// Up to this a copy takes no longer than waking a thread: it is done by finish().
constexpr std::size_t kInlineBytes = 64 << 10;

// Where runs begin in a piece, so that copies are aligned on the host as well.
constexpr std::size_t kRunAlignment = 512;

// One run.
struct Fill {
  PinnedRing::Piece* piece = nullptr;
  std::byte* from = nullptr;  // in the piece
  std::byte* to = nullptr;
  std::size_t bytes = 0;
  MemcpyPool::Job job;
};

// Walks over one destination, and tells what its bytes are made of.
class Parts {
 public:
  Parts() = default;
  explicit Parts(const Destination& destination) : destination_(&destination) {}

  // Calls `part(offset, from, bytes)` for all that lies before `end`, in order, from where the last call ended. `from`
  // is nullptr for zeros.
  template <typename Part>
  void take(std::size_t end, Part part) {
    while (begin_ < end) {
      const std::vector<Extent>& extents = destination_->extents;
      const std::size_t first = extent_ < extents.size() ? extents[extent_].offset : end;
      if (begin_ < first) {
        const std::size_t gap_end = (std::min)(first, end);
        part(begin_, static_cast<const std::byte*>(nullptr), gap_end - begin_);
        begin_ = gap_end;
        continue;
      }
      const Extent& extent = extents[extent_];
      const std::size_t extent_end = extent.offset + extent.bytes;
      const std::size_t last = (std::min)(extent_end, end);
      if (begin_ < last) part(begin_, extent.from + (begin_ - first), last - begin_);
      begin_ = last;
      if (begin_ == extent_end) ++extent_;
    }
  }

 private:
  const Destination* destination_ = nullptr;
  std::size_t begin_ = 0;
  std::size_t extent_ = 0;
};

// Cuts destinations into runs, in order.
class Cutter {
 public:
  Cutter(const std::vector<Destination>& destinations, std::size_t piece_bytes)
      : next_(destinations.begin()), end_(destinations.end()), piece_bytes_(piece_bytes) {
    for (const auto& destination : destinations) total_ += destination.bytes;
    open_next();
  }

  bool empty() const { return next_ == end_; }

  // Length of the next run.
  std::size_t bytes() const { return (std::min)(run_bytes(done_, total_, piece_bytes_), next_->bytes - begin_); }

  // Describes the next run: where it goes, and which host bytes make it up once they lie at `fill.from`.
  void cut(Fill& fill) {
    const std::size_t begin = begin_;
    fill.to = next_->to + begin;
    fill.bytes = bytes();
    begin_ += fill.bytes;
    done_ += fill.bytes;
    parts_.take(begin_, [&](std::size_t offset, const std::byte* from, std::size_t bytes) {
      fill.job.copies.push_back({fill.from + (offset - begin), from, bytes});
    });
    if (begin_ == next_->bytes) {
      ++next_;
      open_next();
    }
  }

 private:
  void open_next() {
    while (next_ != end_ && next_->bytes == 0) ++next_;
    begin_ = 0;
    if (next_ != end_) parts_ = Parts(*next_);
  }

  std::vector<Destination>::const_iterator next_;
  const std::vector<Destination>::const_iterator end_;
  const std::size_t piece_bytes_;
  Parts parts_;            // of *next_
  std::size_t begin_ = 0;  // in *next_
  std::size_t done_ = 0;
  std::size_t total_ = 0;
};

// The runs being filled, oldest first, and their pieces, each of which holds as many runs as fit: however short runs
// are, a batch takes little more of the ring than its bytes. Its end, in whatever way it comes, returns every piece.
class Filling {
 public:
  Filling(PinnedRing& ring, MemcpyPool& pool, CopyEngine& engine) : ring_(ring), pool_(pool), engine_(engine) {}
  Filling(const Filling&) = delete;
  Filling& operator=(const Filling&) = delete;
  ~Filling() {
    for (auto& fill : fills_) pool_.cancel(fill.job);
    // Only after a failure. Those copies read a piece that is about to be given back.
    if (queued_) settle(engine_, fills_.front().piece->event);
    while (!fills_.empty()) {
      if (is_last_of_piece()) ring_.release(*fills_.front().piece, false);
      fills_.pop_front();
    }
  }

  bool empty() const { return fills_.empty(); }

  // Whether the newest piece has room for that many bytes more.
  bool has_room(std::size_t bytes) const { return !empty() && used_ + bytes <= ring_.piece_bytes(); }

  // Puts the next run into `piece`, or behind the newest run where there is none.
  void start(PinnedRing::Piece* piece, Cutter& cutter) {
    const std::size_t begin = piece == nullptr ? used_ : 0;
    try {
      fills_.emplace_back();  // a deque: the pool keeps the job's address
    } catch (...) {
      if (piece != nullptr) ring_.release(*piece, false);  // nobody else knows of it
      throw;
    }
    Fill& fill = fills_.back();
    fill.piece = piece != nullptr ? piece : fills_[fills_.size() - 2].piece;
    fill.from = fill.piece->data + begin;
    cutter.cut(fill);
    used_ = begin + (fill.bytes + kRunAlignment - 1) / kRunAlignment * kRunAlignment;
    if (fill.bytes > kInlineBytes) pool_.start(fill.job);
  }

  // Call it when the next run, if there is one, has no room in the newest piece.
  void submit_oldest() {
    Fill& fill = fills_.front();
    pool_.finish(fill.job);
    queued_ = true;  // perhaps even if it fails
    engine_.copy(fill.to, fill.from, fill.bytes);
    if (is_last_of_piece()) {
      engine_.record(fill.piece->event);
      queued_ = false;
      ring_.release(*fill.piece, true);
    }
    fills_.pop_front();
  }

 private:
  bool is_last_of_piece() const { return fills_.size() == 1 || fills_[1].piece != fills_.front().piece; }

  PinnedRing& ring_;
  MemcpyPool& pool_;
  CopyEngine& engine_;
  std::deque<Fill> fills_;
  std::size_t used_ = 0;  // of the newest piece
  bool queued_ = false;   // copies out of the oldest piece, with no event behind them yet
};

}  // namespace

void staged_copy(const std::vector<Destination>& destinations, PinnedRing& ring, MemcpyPool& pool, CopyEngine& engine) {
  Cutter cutter(destinations, ring.piece_bytes());
  Filling filling(ring, pool, engine);
  while (!cutter.empty() || !filling.empty()) {
    while (!cutter.empty()) {
      PinnedRing::Piece* piece = nullptr;
      if (!filling.has_room(cutter.bytes())) {
        // Only empty-handed may one wait for a piece; see PinnedRing.
        piece = filling.empty() ? &ring.acquire(engine) : ring.try_acquire(engine);
        if (piece == nullptr) break;
      }
      filling.start(piece, cutter);
    }
    filling.submit_oldest();
  }
}

void direct_copy(const std::vector<Destination>& destinations, CopyEngine& engine) {
  static const std::array<std::byte, 512> zeros{};
  for (const auto& destination : destinations) {
    Parts(destination).take(destination.bytes, [&](std::size_t offset, const std::byte* from, std::size_t bytes) {
      if (from != nullptr) {
        engine.copy(destination.to + offset, from, bytes);
        return;
      }
      for (std::size_t done = 0; done < bytes; done += zeros.size()) {
        engine.copy(destination.to + offset + done, zeros.data(), (std::min)(zeros.size(), bytes - done));
      }
    });
  }
}

bool copy_batch(std::vector<Destination> pinned, std::vector<Destination> others, PinnedRing* ring, MemcpyPool& pool,
                CopyEngine& engine) {
  if (ring == nullptr) {
    direct_copy(pinned, engine);
    direct_copy(others, engine);
    return true;
  }
  const bool reads_sources = !pinned.empty();
  try {
    direct_copy(pinned, engine);
  } catch (...) {  // if it was no refusal, staging meets the error again
    std::move(pinned.begin(), pinned.end(), std::back_inserter(others));
  }
  staged_copy(others, *ring, pool, engine);
  return reads_sources;
}

}  // namespace gpuprefetch
