#include "device_copier.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "rows.h"
#include "staged_copy.h"

namespace gpuprefetch {
namespace {

// The copy stream as the standard-library part sees it. Events are handles that Python made to sleep in
// synchronize(): those that c10 would make itself spin.
class StreamEngine final : public CopyEngine {
 public:
  explicit StreamEngine(c10::Stream stream) : stream_(stream), impl_(stream.device_type()) {}

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    const auto size = static_cast<std::int64_t>(bytes);
    const auto options = at::TensorOptions().dtype(at::kByte);
    const auto target = at::for_blob(to, {size})
                            .options(options.device(stream_.device()))
                            .target_device(stream_.device())  // else it is looked up by a call of the driver
                            .make_tensor();
    target.copy_(at::from_blob(const_cast<std::byte*>(from), {size}, options), /*non_blocking=*/true);
  }

  void record(Event event) override { record_on(stream_, event); }
  bool query(Event event) override { return impl_.queryEvent(event); }
  void synchronize(Event event) override { impl_.synchronizeEvent(event); }

  c10::Stream consumer_stream() const { return impl_.getStream(stream_.device()); }
  // The guard puts the caller's device back without making a context there; record() and block() would make one.
  void record_on(c10::Stream stream, Event event) const {
    const c10::DeviceGuard guard(stream.device());
    impl_.record(&event, stream, stream.device_index(), c10::EventFlag::BACKEND_DEFAULT);
  }
  void make_wait(c10::Stream stream, Event event) const {
    const c10::DeviceGuard guard(stream.device());
    impl_.block(event, stream);
  }
  void keep_for(c10::Stream stream, const c10::Storage& memory) const {
    impl_.recordDataPtrOnStream(memory.data_ptr(), stream);
  }

  // Under Windows' display driver model commands may sit in a queue of the driver until something asks for them.
  void flush() const { impl_.queryStream(stream_); }

 private:
  const c10::Stream stream_;
  const c10::impl::VirtualGuardImpl impl_;
};

std::string mebibytes(std::int64_t bytes) {
  const auto tenths = (bytes * 10 + (1 << 19)) >> 20;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " MiB";
}

const std::byte* address_of(const at::Tensor& tensor) { return static_cast<const std::byte*>(tensor.const_data_ptr()); }

// Whether the memory is pinned where the tensor begins: torch tells of the begin of its storage.
bool is_pinned(const at::Tensor& tensor) {
  return at::from_blob(const_cast<std::byte*>(address_of(tensor)), {1}, at::TensorOptions().dtype(at::kByte))
      .is_pinned();
}

// Runs a step that calls the driver. Its failure is told with what it was about and what to do.
template <typename Step>
auto call_driver(const std::string& what, Step step) {
  try {
    return step();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    throw CopyError(what + " failed: " + error.what_without_backtrace() +
                    "\nIf an earlier kernel failed, every later call reports its error: run once with "
                    "CUDA_LAUNCH_BLOCKING=1 to find the kernel, then restart the process.");
  }
}

// Rows at one constant step are one extent, however short they are. Where so few are that listing extents takes longer
// than copying, torch makes the tensor dense. So it does where there is no ring: each row would be a copy of its own.
constexpr std::size_t kLeastBlockBytes = 128;

Rows rows_of(const at::Tensor& source, const at::Tensor& output) {
  return Rows(source.sizes(), source.strides(), output.strides(), source.itemsize());
}

// Whether a dense tensor, or sample, is copied from where it lies. To ask costs a call of the driver. A small one is
// staged in any case, so that nobody has to wait until its copy has run.
bool goes_by_itself(const at::Tensor& source) { return source.nbytes() > kSmallLeafBytes && is_pinned(source); }

at::Tensor dense_like(const at::Tensor& source, const at::Tensor& output) {
  auto dense = at::empty_strided(output.sizes(), output.strides(), source.options());
  return dense.copy_(source);
}

// What copy_batch() takes.
struct Copies {
  std::vector<Destination> staged, pinned;
  std::vector<at::Tensor> dense;  // keeps what torch made dense until it has been read
};

Copies copies_of(const Sources& sources, const Layout& layout, const Outputs& outputs, bool has_ring) {
  Copies copies;
  for (std::size_t i = 0; i < layout.storages.size(); ++i) {
    auto* const begin = static_cast<std::byte*>(outputs.storages[i].mutable_data_ptr());
    copies.staged.push_back(Destination{begin, layout.storages[i].bytes, {}});
  }
  auto place = layout.places.begin();
  for (std::size_t i = 0; i < sources.tensors.size(); ++i, ++place) {
    const at::Tensor* source = &sources.tensors[i];
    Rows rows = rows_of(*source, outputs.tensors[i]);
    if (rows.count() > 1 && (source->nbytes() < rows.blocks() * kLeastBlockBytes || !has_ring)) {
      source = &copies.dense.emplace_back(dense_like(*source, outputs.tensors[i]));
      rows = rows_of(*source, outputs.tensors[i]);
    }
    Destination& destination = copies.staged[place->storage];
    if (destination.extents.empty()) destination.extents.reserve(rows.blocks());
    const std::byte* const begin = address_of(*source);
    std::size_t offset = place->offset;
    rows.each_block([&](std::size_t from, std::size_t count, std::size_t stride) {
      destination.extents.push_back(Extent{begin + from, offset, rows.row_bytes(), count, stride});
      offset += rows.row_bytes() * count;
    });
    if (rows.count() == 1 && goes_by_itself(*source)) copies.pinned.push_back(std::exchange(destination, {}));
  }
  for (const auto& samples : sources.stacks) {
    Destination& destination = copies.staged[place->storage];
    if (destination.extents.empty()) destination.extents.reserve(samples.size());
    std::size_t offset = place->offset;
    for (const auto& sample : samples) {
      destination.extents.push_back(Extent{address_of(sample), offset, sample.nbytes()});
      offset += sample.nbytes();
    }
    ++place;
    if (std::all_of(samples.begin(), samples.end(), goes_by_itself)) {
      copies.pinned.push_back(std::exchange(destination, {}));
    }
  }
  return copies;
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  const auto keys = tensor.key_set().remove(c10::DispatchKey::ADInplaceOrView) - c10::autograd_dispatch_keyset -
                    c10::autocast_dispatch_keyset;
  return keys == c10::DispatchKeySet(c10::DispatchKey::CPU) && !tensor.requires_grad() &&
         at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                          static_cast<std::size_t>(tensor.storage_offset())) <=
             tensor.storage().nbytes();
}

bool can_gather(const std::vector<at::Tensor>& samples) {
  for (const auto& sample : samples) {
    // Samples of one pixel may be contiguous and channels_last, and then their stack has the strides of the latter.
    if (!is_plain(sample) || !sample.is_contiguous() ||
        sample.suggest_memory_format() != c10::MemoryFormat::Contiguous || sample.sizes() != samples.front().sizes() ||
        sample.scalar_type() != samples.front().scalar_type()) {
      return false;
    }
  }
  return !samples.empty();
}

void DeviceCopier::set_ring(std::uintptr_t memory, std::size_t piece_bytes, const std::vector<Event>& events) {
  const std::lock_guard<std::mutex> lock(ring_mutex_);
  if (ring_) {
    StreamEngine engine(stream_);
    call_driver("waiting for copies out of pinned memory", [&] { ring_->drain(engine); });
  }
  ring_ = events.empty() ? nullptr
                         : std::make_unique<PinnedRing>(reinterpret_cast<std::byte*>(memory), piece_bytes, events);
  has_ring_ = ring_ != nullptr;
}

void DeviceCopier::remember(const c10::Storage& memory) {
  WeakStorage reference = memory.getWeakStorageImpl();
  const std::lock_guard<std::mutex> lock(handed_over_mutex_);
  handed_over_[next_handed_over_++ % handed_over_.size()].swap(reference);
  // The oldest one ends behind the lock: it may be the last to keep a Python object, whose end may run any code.
}

void DeviceCopier::leak_handed_over() {
  const std::lock_guard<std::mutex> lock(handed_over_mutex_);
  for (const auto& reference : handed_over_) reference.lock().release();
}

Lane::Lane(std::shared_ptr<DeviceCopier> copier, std::int64_t prefetch_batches, const std::vector<Event>& events,
           std::chrono::milliseconds overdue_after, std::function<std::int64_t()> free_bytes)
    : copier_(std::move(copier)),
      ready_events_(events.begin() + HoldBack::events_needed(prefetch_batches), events.end()),
      free_bytes_(std::move(free_bytes)),
      hold_back_(prefetch_batches, {events.begin(), events.begin() + HoldBack::events_needed(prefetch_batches)},
                 overdue_after) {}

std::int64_t Lane::events_needed(std::int64_t prefetch_batches) {
  return HoldBack::events_needed(prefetch_batches) + prefetch_batches + 2;
}

void Lane::ask() {
  const StreamEngine engine(copier_->stream_);
  call_driver("recording the consumer's progress",
              [&] { engine.record_on(engine.consumer_stream(), hold_back_.begin_ask()); });
  hold_back_.end_ask();
}

bool Lane::wait_for_room(std::int64_t batch, std::int64_t bytes) {
  StreamEngine engine(copier_->stream_);
  const auto room = call_driver("waiting for the device's progress", [&] {
    const auto room = hold_back_.wait_for_room(batch, bytes, engine);
    const bool too_large = room == HoldBack::Room::kFree && hold_back_.grows(batch) &&
                           (hold_back_.short_of_memory() || free_bytes_() < bytes);
    return too_large ? hold_back_.wait_for_memory(batch, engine) : room;
  });
  if (room == HoldBack::Room::kOverdue) overdue_.store(true, std::memory_order_relaxed);
  return room != HoldBack::Room::kStopped;
}

bool Lane::wait_until_due(std::int64_t batch, const std::function<void()>& interrupt) {
  StreamEngine engine(copier_->stream_);
  const auto room = call_driver("waiting for the device's progress",
                                [&] { return hold_back_.wait_until_due(batch, engine, interrupt); });
  return room != HoldBack::Room::kStopped;
}

std::optional<Outputs> Lane::put(std::int64_t batch, const Sources& sources, std::int64_t other_bytes, bool finish) {
  // Before anything that others share is taken: a consumer that pauses may pause for ever.
  const Layout layout = lay_out(sources);
  const auto bytes = static_cast<std::int64_t>(layout.bytes());
  if (!wait_for_room(batch, bytes + other_bytes)) return std::nullopt;

  const c10::StreamGuard on_copy_stream(copier_->stream_);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto subject =
      "batch " + std::to_string(batch) + " (" + mebibytes(bytes) + ") to " + copier_->stream_.device().str();
  const auto allocate_all = [&] { return allocate(sources, layout, copier_->stream_.device()); };
  Outputs outputs;
  try {
    try {
      outputs = call_driver("allocating memory for " + subject, allocate_all);
    } catch (const c10::OutOfMemoryError&) {
      if (!wait_until_due(batch)) return std::nullopt;
      outputs = call_driver("allocating memory for " + subject, allocate_all);
    }
  } catch (const c10::OutOfMemoryError& error) {
    throw OutOfDeviceMemory("no memory to copy " + subject +
                            ", even with nothing prefetched: " + error.what_without_backtrace() +
                            "\nThe loop needs room for one batch more than it holds: use a smaller batch, or free "
                            "memory on the device.");
  }
  hold_back_.took_memory(batch);
  call_driver("copying " + subject, [&] { copy(sources, layout, outputs, ready(batch), finish); });
  return outputs;
}

void Lane::hand_over(std::int64_t batch, const std::vector<at::Tensor>& held) {
  const StreamEngine engine(copier_->stream_);
  call_driver("handing batch " + std::to_string(batch) + " over", [&] {
    const auto stream = engine.consumer_stream();
    engine.make_wait(stream, ready(batch));
    // A dataset's own tensors may share a storage. Another call would change nothing.
    std::unordered_set<const c10::StorageImpl*> kept;
    for (const auto& tensor : held) {
      if (tensor.device() != stream.device()) continue;
      if (!kept.insert(tensor.storage().unsafeGetStorageImpl()).second) continue;
      copier_->remember(tensor.storage());
      engine.keep_for(stream, tensor.storage());
    }
  });
}

void Lane::copy(const Sources& sources, const Layout& layout, const Outputs& outputs, Event ready, bool finish) {
  // Before the ring is taken, for which others wait.
  Copies copies = copies_of(sources, layout, outputs, copier_->has_ring_);

  StreamEngine engine(copier_->stream_);
  std::unique_lock<std::mutex> lock(copier_->ring_mutex_);
  try {
    const bool reads_sources =
        copy_batch(std::move(copies.pinned), std::move(copies.staged), copier_->ring_.get(), copier_->pool_, engine);
    engine.record(ready);
    engine.flush();
    lock.unlock();
    if (finish || reads_sources) engine.synchronize(ready);
  } catch (...) {
    // The caller is free to write to pinned sources once this has thrown.
    settle(engine, ready);
    throw;
  }
}

Event Lane::ready(std::int64_t batch) const {
  return ready_events_[static_cast<std::size_t>(batch) % ready_events_.size()];
}

}  // namespace gpuprefetch
