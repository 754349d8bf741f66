#include "pinned_ring.h"

namespace gpuprefetch {

PinnedRing::PinnedRing(std::byte* memory, std::size_t piece_bytes, const std::vector<Event>& events)
    : piece_bytes_(piece_bytes) {
  pieces_.reserve(events.size());  // addresses of pieces are handed out
  for (Event event : events) {
    pieces_.push_back(Piece{memory + pieces_.size() * piece_bytes, event, false, nullptr});
    push(pieces_.back());
  }
}

PinnedRing::Piece& PinnedRing::acquire(CopyEngine& engine) {
  Piece* piece = nullptr;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    returned_.wait(lock, [this] { return first_ != nullptr; });
    piece = first_;
    first_ = piece->next;
  }
  // Outside the lock: whoever has a copy to queue must be able to give its piece back meanwhile.
  try {
    if (piece->in_flight) engine.synchronize(piece->event);
  } catch (...) {
    release(*piece, true);
    throw;
  }
  return *piece;
}

PinnedRing::Piece* PinnedRing::try_acquire(CopyEngine& engine) {
  std::lock_guard<std::mutex> lock(mutex_);
  Piece* piece = first_;
  if (piece == nullptr || (piece->in_flight && !engine.query(piece->event))) return nullptr;
  first_ = piece->next;
  return piece;
}

void PinnedRing::release(Piece& piece, bool in_flight) noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    piece.in_flight = in_flight;
    push(piece);
  }
  returned_.notify_one();
}

void PinnedRing::push(Piece& piece) noexcept {
  piece.next = nullptr;
  (first_ == nullptr ? first_ : last_->next) = &piece;
  last_ = &piece;
}

void PinnedRing::drain(CopyEngine& engine) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& piece : pieces_) {
    if (piece.in_flight) engine.synchronize(piece.event);
    piece.in_flight = false;
  }
}

}  // namespace gpuprefetch
