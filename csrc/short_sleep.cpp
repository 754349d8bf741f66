#include "short_sleep.h"

#ifdef _WIN32
#ifndef NOMINMAX
#define NOMINMAX
#endif
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h>  // winlint: ok
#ifndef CREATE_WAITABLE_TIMER_HIGH_RESOLUTION
#define CREATE_WAITABLE_TIMER_HIGH_RESOLUTION 0x00000002
#endif
#else
#include <thread>
#endif

namespace gpuprefetch {
#ifdef _WIN32
namespace {

class Timer {
 public:
  Timer() = default;
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    if (handle != nullptr) CloseHandle(handle);
  }

  const HANDLE handle =
      CreateWaitableTimerExW(nullptr, nullptr, CREATE_WAITABLE_TIMER_HIGH_RESOLUTION, SYNCHRONIZE | TIMER_MODIFY_STATE);
};

}  // namespace
#endif

void short_sleep(std::chrono::microseconds duration) {
#ifdef _WIN32
  thread_local const Timer timer;
  LARGE_INTEGER due;
  due.QuadPart = -10 * static_cast<LONGLONG>(duration.count());  // relative, in units of 100 ns
  if (timer.handle != nullptr && SetWaitableTimer(timer.handle, &due, 0, nullptr, nullptr, FALSE)) {
    WaitForSingleObject(timer.handle, INFINITE);
  } else {
    SwitchToThread();  // an older Windows: better to look again at once than a tick too late
  }
#else
  std::this_thread::sleep_for(duration);
#endif
}

}  // namespace gpuprefetch
