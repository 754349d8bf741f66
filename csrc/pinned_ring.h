// Pieces of one pinned buffer, first in, first out. Standard library only.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

#include "copy_engine.h"

namespace gpuprefetch {

// A piece goes from the ring to whoever fills it, and back as soon as the copies out of it are queued, with an event
// that says when its bytes may be overwritten. Copies leave through one stream, so pieces become free in the order in
// which they came back. All members may be called from any thread.
//
// Who holds pieces must not wait for another one by acquire(): two batches that share the ring would wait for each
// other. try_acquire() is for that. A wait for a piece then lasts as long as the copy engine needs, never as long as
// a consumer likes.
class PinnedRing {
 public:
  struct Piece {
    std::byte* data;
    Event event;
    bool in_flight;  // a copy out of it was queued; `event` says when it has run
    Piece* next;     // the ring's own: what waits behind it
  };

  // Cuts `memory`, events.size() * piece_bytes long, into one piece an event. Owns neither memory nor events.
  PinnedRing(std::byte* memory, std::size_t piece_bytes, const std::vector<Event>& events);
  PinnedRing(const PinnedRing&) = delete;  // pieces are handed out by address
  PinnedRing& operator=(const PinnedRing&) = delete;

  std::size_t piece_bytes() const { return piece_bytes_; }

  // The next piece, once it may be overwritten.
  Piece& acquire(CopyEngine& engine);

  // The next piece if it may be overwritten now, else nullptr.
  Piece* try_acquire(CopyEngine& engine);

  // Gives a piece back: after its copies were queued and its event recorded (in_flight), or unused.
  // Allocates nothing, so that no piece is lost where memory has run out.
  void release(Piece& piece, bool in_flight) noexcept;

  // Sleeps until no copy reads the buffer. Call it with no piece out.
  void drain(CopyEngine& engine);

 private:
  void push(Piece& piece) noexcept;

  const std::size_t piece_bytes_;
  std::vector<Piece> pieces_;
  std::mutex mutex_;
  std::condition_variable returned_;
  Piece* first_ = nullptr;  // the pieces that are here: nullptr if there is none
  Piece* last_ = nullptr;
};

}  // namespace gpuprefetch
