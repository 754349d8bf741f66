// What staging needs to know of a device. Standard library only: the tests put a simulated device behind it.
#pragma once

#include <cstddef>

namespace gpuprefetch {

// An event of the device's runtime, made and owned by the caller. Recording it again moves it.
using Event = void*;

class CopyEngine {
 public:
  CopyEngine() = default;
  CopyEngine(const CopyEngine&) = delete;  // one stream, one engine: others refer to it
  CopyEngine& operator=(const CopyEngine&) = delete;
  virtual ~CopyEngine() = default;

  // Queues a copy of `bytes` bytes from host memory to device memory, behind everything queued before. Pinned
  // memory must stay as it is until an event recorded afterwards is done; pageable memory has been read at return.
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;

  // Marks the end of everything queued so far.
  virtual void record(Event event) = 0;

  // True once everything before the event's last record has run. Never waits.
  virtual bool query(Event event) = 0;

  // Sleeps until query() would be true.
  virtual void synchronize(Event event) = 0;
};

// After a call that failed: whatever was queued all the same has run at return. Records `event` anew.
inline void settle(CopyEngine& engine, Event event) noexcept {
  try {
    engine.record(event);
    engine.synchronize(event);
  } catch (...) {
    // The device is beyond reach: no copy of its runs any more.
  }
}

}  // namespace gpuprefetch
