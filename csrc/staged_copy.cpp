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

struct Fill {
  PinnedRing::Piece* piece = nullptr;
  Run run;
};

// The runs being filled, oldest first, and their pieces, each of which holds as many runs as fit. What stays empty of a
// piece is less than a least run. Its end, in whatever way it comes, returns every piece.
class Filling {
 public:
  Filling(PinnedRing& ring, MemcpyPool& pool, CopyEngine& engine) : ring_(ring), pool_(pool), engine_(engine) {}
  Filling(const Filling&) = delete;
  Filling& operator=(const Filling&) = delete;
  ~Filling() {
    for (auto& fill : fills_) pool_.cancel(fill.run.job);
    // Only after a failure. Those copies read a piece that is about to be given back.
    if (queued_) settle(engine_, fills_.front().piece->event);
    while (!fills_.empty()) {
      if (is_last_of_piece()) ring_.release(*fills_.front().piece, false);
      fills_.pop_front();
    }
  }

  bool empty() const { return fills_.empty(); }

  // Starts the next run: behind the newest one, if its piece has room for as much as is worth a run. False if the ring
  // has no piece now.
  bool start(Cutter& cutter) {
    std::size_t bytes = cutter.bytes();
    const std::size_t room = empty() ? 0 : ring_.piece_bytes() - (std::min)(used_, ring_.piece_bytes());
    PinnedRing::Piece* piece = nullptr;
    if ((std::min)(bytes, cutter.least_bytes()) <= room) {
      if (bytes > room) bytes = room / kRunStep * kRunStep;
    } else {
      // Only empty-handed may one wait for a piece; see PinnedRing.
      piece = empty() ? &ring_.acquire(engine_) : ring_.try_acquire(engine_);
      if (piece == nullptr) return false;
    }
    const std::size_t begin = piece == nullptr ? used_ : 0;
    try {
      fills_.emplace_back();
    } catch (...) {
      if (piece != nullptr) ring_.release(*piece, false);  // nobody else knows of it
      throw;
    }
    Fill& fill = fills_.back();
    fill.piece = piece != nullptr ? piece : fills_[fills_.size() - 2].piece;
    fill.run = cutter.cut(bytes, fill.piece->data + begin);
    used_ = begin + (bytes + kRunAlignment - 1) / kRunAlignment * kRunAlignment;
    if (!is_short(fill)) pool_.start(fill.run.job);
    count_short();
    return true;
  }

  // Whether the pool is through with the oldest run that it was given: runs before it are short, and this thread fills
  // them when it submits them. Not if there is but one run, behind which the next one may belong.
  bool may_submit() const {
    return fills_.size() > 1 && short_ < fills_.size() && pool_.is_done(fills_[short_].run.job);
  }

  // Call it when may_submit(), or when the next run, if there is one, could not be started.
  void submit_oldest() {
    Fill& fill = fills_.front();
    pool_.finish(fill.run.job);
    queued_ = true;  // perhaps even if it fails
    engine_.copy(fill.run.to, fill.run.from, fill.run.bytes);
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
  static bool is_short(const Fill& fill) { return fill.run.bytes <= kInlineBytes; }
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
    Extents(destination).take(destination.bytes, [&](const Extent& part) {
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
