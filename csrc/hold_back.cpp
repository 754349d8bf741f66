#include "hold_back.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "platform.h"

namespace gpuprefetch {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr auto kInterruptInterval = std::chrono::milliseconds(100);

// Sleeps an eighth of the time waited so far, so that the end of a wait is seen soon in proportion to its length, and
// a long wait costs no processor time to speak of. A sleep on the event itself could not be ended by stop().
class Backoff {
 public:
  void sleep() {
    const auto waited = std::chrono::duration_cast<microseconds>(Clock::now() - start_);
    short_sleep_.sleep((std::clamp)(waited / 8, microseconds(50), microseconds(500)));
  }

 private:
  const Clock::time_point start_ = Clock::now();
  ShortSleep short_sleep_;
};

}  // namespace

HoldBack::HoldBack(std::int64_t prefetch_batches, std::vector<Event> events, std::chrono::milliseconds overdue_after)
    : prefetch_batches_(prefetch_batches),
      events_(std::move(events)),
      overdue_after_(overdue_after),
      bytes_(events_.size()) {}

// Events complete in order, so the first that is not done ends the look. An event that was recorded again for a later
// batch is done later than the one it stood for: the look errs towards waiting.
void HoldBack::look(CopyEngine& engine) {
  const std::int64_t asked = asked_.load(std::memory_order_acquire);
  while (finished_ + 1 < asked && engine.query(event(finished_ + 1))) ++finished_;
}

bool HoldBack::has_room(std::int64_t batch) const {
  if (batch >= 2 && asked_.load(std::memory_order_relaxed) < 2) return false;  // the loop has not gone round yet
  const std::int64_t lag = batch - prefetch_batches_ - finished_;
  if (lag <= 0) return true;
  return lag <= kSmallBatches && bytes_since(finished_, batch) <= kSmallBytes;
}

bool HoldBack::is_due(std::int64_t batch) const {
  return asked_.load(std::memory_order_relaxed) > batch && finished_ >= batch;
}

std::int64_t HoldBack::bytes_since(std::int64_t first, std::int64_t batch) const {
  const auto slots = static_cast<std::int64_t>(bytes_.size());
  const std::int64_t oldest = (std::max)(first, batch - slots + 1);
  std::int64_t bytes = 0;
  for (std::int64_t n = (std::max)(oldest, std::int64_t{0}); n <= batch; ++n) {
    bytes += bytes_[static_cast<std::size_t>(n % slots)];
  }
  return bytes;
}

HoldBack::Room HoldBack::wait_for_room(std::int64_t batch, std::int64_t bytes, CopyEngine& engine) {
  bytes_[static_cast<std::size_t>(batch) % bytes_.size()] = bytes;
  return wait(batch, [&] { return has_room(batch); }, engine);
}

HoldBack::Room HoldBack::wait_for_memory(std::int64_t batch, CopyEngine& engine) {
  short_of_memory_ = true;
  return wait(batch, [&] { return !grows(batch) || is_due(batch); }, engine);
}

HoldBack::Room HoldBack::wait_until_due(std::int64_t batch, CopyEngine& engine,
                                        const std::function<void()>& interrupt) {
  return wait(batch, [&] { return is_due(batch); }, engine, interrupt);
}

template <typename Condition>
HoldBack::Room HoldBack::wait(std::int64_t batch, Condition condition, CopyEngine& engine,
                              const std::function<void()>& interrupt) {
  Backoff backoff;
  Clock::time_point next_interrupt = Clock::now() + kInterruptInterval;
  std::optional<Clock::time_point> asked_since;
  for (;;) {
    if (stopped()) return Room::kStopped;
    look(engine);
    if (condition()) return Room::kFree;
    if (asked_.load(std::memory_order_relaxed) > batch) {
      if (!asked_since) asked_since = Clock::now();
      if (Clock::now() - *asked_since >= overdue_after_) return Room::kOverdue;
    }
    if (interrupt && Clock::now() >= next_interrupt) {
      interrupt();
      next_interrupt = Clock::now() + kInterruptInterval;
    }
    backoff.sleep();
  }
}

}  // namespace gpuprefetch
