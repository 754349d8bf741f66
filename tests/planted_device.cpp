// A device guard for the CPU: with it the compiled copier runs where there is no device. Copies are the host's own and
// done at once; events and recorded memory are counted, and a call can be told to fail.
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace {

using c10::Device;
using c10::Stream;

const Device kHost(c10::DeviceType::CPU, -1);

std::mutex mutex;
std::vector<const void*> recorded;
std::int64_t until_failure = -1;
bool is_slow = false;

void call() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (until_failure >= 0) TORCH_CHECK(until_failure-- != 0, "planted");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kHost.type(); }
  Device exchangeDevice(Device) const override { return kHost; }
  Device getDevice() const override { return kHost; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kHost); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kHost); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { call(); }
  void block(void*, const Stream&) const override { call(); }
  bool queryEvent(void*) const override {
    call();
    const std::lock_guard<std::mutex> lock(mutex);
    return !is_slow;
  }
  void synchronizeEvent(void*) const override { call(); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream&) const override {
    const std::lock_guard<std::mutex> lock(mutex);
    recorded.push_back(memory.get());
  }
};

std::atomic<const c10::impl::DeviceGuardImplInterface*>& place() {
  return c10::impl::device_guard_impl_registry[static_cast<std::size_t>(kHost.type())];
}
const c10::impl::DeviceGuardImplInterface* before = nullptr;

}  // namespace

extern "C" {

void install() { before = place().exchange(new Guard); }  // never freed: who has asked for it may keep it
void remove_again() { place().store(before); }

// The call after so many of events fails, once; negative: none.
void fail_after(std::int64_t calls) {
  const std::lock_guard<std::mutex> lock(mutex);
  until_failure = calls;
}

// With 1 no event is done for who only asks, until 0.
void be_slow(int slow) {
  const std::lock_guard<std::mutex> lock(mutex);
  is_slow = slow != 0;
}

void forget_recorded() {
  const std::lock_guard<std::mutex> lock(mutex);
  recorded.clear();
}

// How often memory that begins there was recorded on a stream.
std::int64_t times_recorded(const void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::int64_t count = 0;
  for (const void* each : recorded) count += each == memory;
  return count;
}
}
