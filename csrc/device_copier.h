// Host tensors to the device: allocation, staging, order of streams. ATen and c10 only, no CUDA header.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <vector>

#include "copy_engine.h"
#include "hold_back.h"
#include "memcpy_pool.h"
#include "outputs.h"
#include "pinned_ring.h"

namespace gpuprefetch {

// Every message names the call, its size and a remedy.
struct CopyError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct OutOfDeviceMemory : CopyError {
  using CopyError::CopyError;
};

// True if the tensor is nothing but the bytes that it shows: dense CPU memory, all of it there. Conjugated, negated,
// zero, quantized and nested tensors answer "cpu" and "strided" too, and copies of their bytes are wrong or crash.
bool is_plain(const at::Tensor& tensor);

// True if the samples are plain, contiguous, of one shape and dtype: their stack is their bytes one after another.
bool can_gather(const std::vector<at::Tensor>& samples);

// The copy stream of one device and the pinned ring behind it. One a process and device. All members may be called
// from any thread.
class DeviceCopier {
 public:
  DeviceCopier(c10::Stream stream, MemcpyPool& pool) : stream_(stream), pool_(pool) {}

  // Replaces the pinned ring, or takes it away (no events): copies then leave from pageable memory. Returns when the
  // memory of the old one is not used any more. The caller owns the memory and keeps it until the next call.
  void set_ring(std::uintptr_t memory, std::size_t piece_bytes, const std::vector<Event>& events);

  // For the end of a process whose device is beyond reach: keeps what was handed over last and is still there. Freeing
  // memory that was recorded on a stream calls the driver, and a refusal there ends the process by abort: instead of
  // the error that broke the device, that would be the last word. Call it under the GIL.
  void leak_handed_over();

 private:
  friend class Lane;

  void remember(const c10::Storage& memory);

  const c10::Stream stream_;
  MemcpyPool& pool_;
  std::mutex
      ring_mutex_;  // held while a batch goes through the ring: there is one bus, so batches gain nothing by sharing
  std::unique_ptr<PinnedRing> ring_;
  std::atomic<bool> has_ring_{false};  // for who must not wait until the batch of another has gone through it

  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  std::mutex handed_over_mutex_;
  std::vector<WeakStorage> handed_over_ =
      std::vector<WeakStorage>(256, WeakStorage(c10::intrusive_ptr<c10::StorageImpl>()));  // none yet
  std::size_t next_handed_over_ = 0;
};

// The way of one epoch's batches to the device and into the consumer's stream. Batches are numbered from 0 in the
// order in which they are put and asked for.
//
// Invariant 2: outputs come from torch's caching allocator on the copy stream, and hand_over() records them on the
// consumer's stream. Without that record the allocator would give memory that queued kernels still read to the next
// copy.
class Lane {
 public:
  // `events`: events_needed(prefetch_batches) of them, owned by the caller, recorded at least once, and kept until the
  // last batch of the lane has been copied and consumed. `free_bytes`: device memory that nobody has taken; called when
  // batches need more than they had so far.
  Lane(std::shared_ptr<DeviceCopier> copier, std::int64_t prefetch_batches, const std::vector<Event>& events,
       std::chrono::milliseconds overdue_after, std::function<std::int64_t()> free_bytes);

  static std::int64_t events_needed(std::int64_t prefetch_batches);

  // Consumer: it is about to wait for the next batch. Marks, on the stream current in this thread, the end of its work
  // on all batches before.
  void ask();

  // Copier: sleeps until there is room for a batch of `bytes` bytes. False if stopped.
  bool wait_for_room(std::int64_t batch, std::int64_t bytes);

  // Copier: sleeps until the consumer waits for this batch and has done its work on the others. False if stopped.
  // `interrupt` is called every 100 ms; what it throws ends the wait.
  bool wait_until_due(std::int64_t batch, const std::function<void()>& interrupt = {});

  // Copier: the device's copies of the sources, as allocate() makes them. `other_bytes` is what the batch takes on the
  // device besides. Sleeps until there is room for the batch. At return all sources have been read; with `finish`, or
  // where a source did not go through the ring, all copies have run. Without memory it waits until the batch is due and
  // tries once more (invariant 11). Nothing if stopped. Throws CopyError.
  std::optional<Outputs> put(std::int64_t batch, const Sources& sources, std::int64_t other_bytes, bool finish);

  // Consumer: makes the stream current in this thread wait for the batch's copy, and the allocator keep the memory of
  // `held` until that stream is through with it. No host wait.
  void hand_over(std::int64_t batch, const std::vector<at::Tensor>& held);

  // Ends all waits, now and for ever.
  void stop() { hold_back_.stop(); }

  // True if a batch was copied although the device had not finished the work that it was held back for; see
  // HoldBack::Room.
  bool overdue() const { return overdue_.load(std::memory_order_relaxed); }

 private:
  void copy(const Sources& sources, const Layout& layout, const Outputs& outputs, Event ready, bool finish);
  Event ready(std::int64_t batch) const;

  const std::shared_ptr<DeviceCopier> copier_;
  const std::vector<Event> ready_events_;
  const std::function<std::int64_t()> free_bytes_;
  HoldBack hold_back_;
  std::atomic<bool> overdue_{false};
};

}  // namespace gpuprefetch
