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
  std::vector<MemcpyPool::Job> jobs;  // a part of it each, in order; the pool keeps their addresses
};

// Walks over one destination, and tells what its bytes are made of.
class Parts {
 public:
  Parts() = default;
  explicit Parts(const Destination& destination) : destination_(&destination) {}

  // Calls `part(extent)` for all that lies before `end`, in order, from where the last call ended. Its `from` is
  // nullptr for zeros.
  template <typename Part>
  void take(std::size_t end, Part part) {
    while (begin_ < end) {
      const std::vector<Extent>& extents = destination_->extents;
      const std::size_t first = extent_ < extents.size() ? extents[extent_].offset : end;
      if (begin_ < first) {
        const std::size_t gap_end = (std::min)(first, end);
        part(Extent{nullptr, begin_, gap_end - begin_});
        begin_ = gap_end;
        continue;
      }
      const Extent& extent = extents[extent_];
      const std::size_t extent_end = extent.offset + extent.row_bytes * extent.rows;
      const std::size_t last = (std::min)(extent_end, end);
      while (begin_ < last) {
        const Extent next = next_rows(extent, last);
        part(next);
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

// Cuts destinations into runs, in order.
class Cutter {
 public:
  Cutter(const std::vector<Destination>& destinations, std::size_t piece_bytes, std::size_t threads)
      : next_(destinations.begin()), end_(destinations.end()), piece_bytes_(piece_bytes), threads_(threads) {
    for (const auto& destination : destinations) total_ += destination.bytes;
    open_next();
  }

  bool empty() const { return next_ == end_; }

  // Length of the next run.
  std::size_t bytes() const {
    return (std::min)(run_bytes(done_, total_, piece_bytes_, threads_), next_->bytes - begin_);
  }

  // Describes the next run: where it goes, and which host bytes make it up once they lie at `fill.from`.
  void cut(Fill& fill) {
    const std::size_t begin = begin_;
    fill.to = next_->to + begin;
    fill.bytes = bytes();
    begin_ += fill.bytes;
    done_ += fill.bytes;
    const std::size_t part = part_bytes(fill.bytes, threads_);
    fill.jobs.resize((fill.bytes + part - 1) / part);
    std::size_t end = begin;
    for (auto& job : fill.jobs) {
      end = (std::min)(end + part, begin_);
      parts_.take(end, [&](const Extent& rows) {
        job.copies.push_back({fill.from + (rows.offset - begin), rows.from, rows.row_bytes, rows.rows, rows.stride});
      });
    }
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
  const std::size_t threads_;
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
    for (auto& fill : fills_) {
      for (auto& job : fill.jobs) pool_.cancel(job);
    }
    // Only after a failure. Those copies read a piece that is about to be given back.
    if (queued_) settle(engine_, fills_.front().piece->event);
    while (!fills_.empty()) {
      if (is_last_of_piece()) ring_.release(*fills_.front().piece, false);
      fills_.pop_front();
    }
  }

  bool empty() const { return fills_.empty(); }

  // Starts the next run: behind the newest one, if that leaves room in its piece. False if the ring has no piece now.
  bool start(Cutter& cutter) {
    PinnedRing::Piece* piece = nullptr;
    if (empty() || used_ + cutter.bytes() > ring_.piece_bytes()) {
      // Only empty-handed may one wait for a piece; see PinnedRing.
      piece = empty() ? &ring_.acquire(engine_) : ring_.try_acquire(engine_);
      if (piece == nullptr) return false;
    }
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
    if (!is_short(fill)) {
      for (auto& job : fill.jobs) pool_.start(job);
    }
    count_short();
    return true;
  }

  // Whether the pool is through with the oldest run that it was given: runs before it are short, and this thread fills
  // them when it submits them. Not if there is but one run, behind which the next one may belong.
  bool may_submit() const {
    if (fills_.size() < 2 || short_ == fills_.size()) return false;
    const auto& jobs = fills_[short_].jobs;
    return std::all_of(jobs.begin(), jobs.end(), [this](const auto& job) { return pool_.is_done(job); });
  }

  // Call it when may_submit(), or when the next run, if there is one, could not be started.
  void submit_oldest() {
    Fill& fill = fills_.front();
    for (auto& job : fill.jobs) pool_.finish(job);
    queued_ = true;  // perhaps even if it fails
    engine_.copy(fill.to, fill.from, fill.bytes);
    if (is_last_of_piece()) {
      engine_.record(fill.piece->event);
      queued_ = false;
      ring_.release(*fill.piece, true);
    }
    fills_.pop_front();
    if (short_ > 0) --short_;
    count_short();
  }

 private:
  static bool is_short(const Fill& fill) { return fill.bytes <= kInlineBytes; }
  void count_short() {
    while (short_ < fills_.size() && is_short(fills_[short_])) ++short_;
  }
  bool is_last_of_piece() const { return fills_.size() == 1 || fills_[1].piece != fills_.front().piece; }

  PinnedRing& ring_;
  MemcpyPool& pool_;
  CopyEngine& engine_;
  std::deque<Fill> fills_;
  std::size_t short_ = 0;  // of the oldest runs, how many are short
  std::size_t used_ = 0;   // of the newest piece
  bool queued_ = false;    // copies out of the oldest piece, with no event behind them yet
};

}  // namespace

void staged_copy(const std::vector<Destination>& destinations, PinnedRing& ring, MemcpyPool& pool, CopyEngine& engine) {
  // Without any, this one fills all.
  Cutter cutter(destinations, ring.piece_bytes(), (std::max)(pool.size(), std::size_t{1}));
  Filling filling(ring, pool, engine);
  while (!cutter.empty() || !filling.empty()) {
    const bool started = !cutter.empty() && filling.start(cutter);
    // The bus need not wait until every run has been started.
    if (!started || filling.may_submit()) filling.submit_oldest();
  }
}

void direct_copy(const std::vector<Destination>& destinations, CopyEngine& engine) {
  static const std::array<std::byte, 512> zeros{};
  for (const auto& destination : destinations) {
    Parts(destination).take(destination.bytes, [&](const Extent& part) {
      std::byte* const to = destination.to + part.offset;
      if (part.from == nullptr) {
        for (std::size_t done = 0; done < part.row_bytes; done += zeros.size()) {
          engine.copy(to + done, zeros.data(), (std::min)(zeros.size(), part.row_bytes - done));
        }
        return;
      }
      for (std::size_t row = 0; row < part.rows; ++row) {
        engine.copy(to + row * part.row_bytes, part.from + row * part.stride, part.row_bytes);
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
