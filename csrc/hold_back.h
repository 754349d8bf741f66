// How far copies may run ahead of the device's own progress. Standard library only.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "copy_engine.h"

namespace gpuprefetch {

// Bounds the device memory of one epoch. It bounds memory only: no correctness argument may rest on it.
//
// Each time the consumer asks for a batch, an event is recorded on its stream. Event n is done when the consumer's
// work on every batch before n is. A copy runs ahead by `prefetch_batches`: batch m finds room once event
// m - prefetch_batches is done. A host that has launched further ahead than that is waited for on the device, so that
// memory which the consumer has dropped is free in fact and not only in name.
//
// Small batches may lag further (kSmallBytes in all): a step of 0.2 ms must not pay for the detection of its end.
//
// Memory that the loop itself needs must be left to it: its own allocations can't wait for ours to come back. So only
// one batch is ahead until the loop has gone round once and has taken what a step takes; and from then on batches take
// more memory than they have taken so far only where the device has it free (grows(), wait_for_memory()).
//
// The consumer calls begin_ask(), end_ask() and stop(); the copying thread everything else.
class HoldBack {
 public:
  static constexpr std::int64_t kSmallBytes = 64 << 20;
  static constexpr std::int64_t kSmallBatches = 16;  // and no further than that

  // Events needed for a given prefetch_batches.
  static constexpr std::int64_t events_needed(std::int64_t prefetch_batches) {
    return prefetch_batches + kSmallBatches + 2;
  }

  // How a wait ended.
  enum class Room {
    kFree,
    kOverdue,  // the consumer waits for this batch, and only the device's progress was in the way for too long
    kStopped,
  };

  // `overdue_after`: a rank may wait for a peer that waits for it; then the copy proceeds although memory is not free.
  HoldBack(std::int64_t prefetch_batches, std::vector<Event> events,
           std::chrono::milliseconds overdue_after = std::chrono::seconds(30));

  // The event to record on the consumer's stream for the batch that it is about to ask for.
  Event begin_ask() const { return event(asked_.load(std::memory_order_relaxed)); }
  void end_ask() { asked_.fetch_add(1, std::memory_order_release); }

  // Sleeps until there is room for a batch of that many bytes on the device.
  Room wait_for_room(std::int64_t batch, std::int64_t bytes, CopyEngine& engine);

  // After wait_for_room(): whether the batch, beside those that are still in use, needs more memory than batches took
  // so far. In use is, beside the unfinished ones, the one before: the consumer drops it only when next() returns.
  bool grows(std::int64_t batch) const { return bytes_since(finished_ - 1, batch) > taken_bytes_; }

  // True once a batch had to wait for memory. What is free from then on is not free for the taking: the loop gave it
  // back under pressure, and will want it again.
  bool short_of_memory() const { return short_of_memory_; }

  // Sleeps until the batch no longer grows, or is due as in wait_until_due().
  Room wait_for_memory(std::int64_t batch, CopyEngine& engine);

  // The batch has got its memory.
  void took_memory(std::int64_t batch) { taken_bytes_ = (std::max)(taken_bytes_, bytes_since(finished_ - 1, batch)); }

  // Sleeps until the consumer waits for this batch and its work on all earlier ones is done: as much memory as there
  // will ever be. `interrupt` is called every 100 ms; what it throws ends the wait.
  Room wait_until_due(std::int64_t batch, CopyEngine& engine, const std::function<void()>& interrupt = {});

  // Ends all waits, now and for ever.
  void stop() { stopped_.store(true, std::memory_order_relaxed); }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

 private:
  Event event(std::int64_t n) const { return events_[static_cast<std::size_t>(n) % events_.size()]; }
  void look(CopyEngine& engine);
  template <typename Condition>
  Room wait(std::int64_t batch, Condition condition, CopyEngine& engine, const std::function<void()>& interrupt = {});
  bool has_room(std::int64_t batch) const;
  bool is_due(std::int64_t batch) const;
  std::int64_t bytes_since(std::int64_t first, std::int64_t batch) const;

  const std::int64_t prefetch_batches_;
  const std::vector<Event> events_;
  const std::chrono::milliseconds overdue_after_;
  std::atomic<std::int64_t> asked_{0};
  std::atomic<bool> stopped_{false};
  std::int64_t finished_ = 0;  // the consumer's work on batches before this one is known to be done
  bool short_of_memory_ = false;
  std::int64_t taken_bytes_ = 0;     // the most that batches in use took at a time
  std::vector<std::int64_t> bytes_;  // of batch m at m % size
};

}  // namespace gpuprefetch
