#include "pinned_ring.h"

namespace gpuprefetch {

PinnedRing::PinnedRing(std::byte* memory, std::size_t piece_bytes, const std::vector<Event>& events)
    : piece_bytes_(piece_bytes) {
  pieces_.reserve(events.size());  // addresses of pieces are handed out
  for (Event event : events) {
    pieces_.push_back(Piece{memory + pieces_.size() * piece_bytes, event, false});
    queue_.push_back(&pieces_.back());
  }
}

PinnedRing::Piece& PinnedRing::acquire(CopyEngine& engine) {
  Piece* piece = nullptr;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    returned_.wait(lock, [this] { return !queue_.empty(); });
    piece = queue_.front();
    queue_.pop_front();
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
  if (queue_.empty()) return nullptr;
  Piece* piece = queue_.front();
  if (piece->in_flight && !engine.query(piece->event)) return nullptr;
  queue_.pop_front();
  return piece;
}

void PinnedRing::release(Piece& piece, bool in_flight) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    piece.in_flight = in_flight;
    queue_.push_back(&piece);
  }
  returned_.notify_one();
}

void PinnedRing::drain(CopyEngine& engine) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& piece : pieces_) {
    if (piece.in_flight) engine.synchronize(piece.event);
    piece.in_flight = false;
  }
}

}  // namespace gpuprefetch
