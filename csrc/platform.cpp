#include "platform.h"

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

#include <cstring>
#include <string>
#else
#include <thread>
#ifdef __linux__
#include <pthread.h>  // winlint: ok
#endif
#endif

namespace gpuprefetch {

#ifdef _WIN32

ShortSleep::ShortSleep()
    : timer_(CreateWaitableTimerExW(nullptr, nullptr, CREATE_WAITABLE_TIMER_HIGH_RESOLUTION,
                                    SYNCHRONIZE | TIMER_MODIFY_STATE)) {}

ShortSleep::~ShortSleep() {
  if (timer_ != nullptr) CloseHandle(timer_);
}

void ShortSleep::sleep(std::chrono::microseconds duration) {
  LARGE_INTEGER due;
  due.QuadPart = -10 * static_cast<LONGLONG>(duration.count());  // relative, in units of 100 ns
  if (timer_ != nullptr && SetWaitableTimer(timer_, &due, 0, nullptr, nullptr, FALSE)) {
    WaitForSingleObject(timer_, INFINITE);
  } else {
    SwitchToThread();
  }
}

void name_this_thread(const char* name) {
  // Looked up when it runs: Windows 10 before 1607 has no such function, and import libraries may not know it.
  using SetThreadDescription = HRESULT(WINAPI*)(HANDLE, PCWSTR);
  const HMODULE kernel = GetModuleHandleW(L"KernelBase.dll");
  const FARPROC address = kernel == nullptr ? nullptr : GetProcAddress(kernel, "SetThreadDescription");
  if (address == nullptr) return;
  SetThreadDescription describe = nullptr;
  static_assert(sizeof(describe) == sizeof(address), "a function pointer is a function pointer");
  std::memcpy(&describe, &address, sizeof(describe));  // a cast between the two types is a warning
  const std::wstring wide(name, name + std::strlen(name));
  describe(GetCurrentThread(), wide.c_str());
}

#else

ShortSleep::ShortSleep() = default;
ShortSleep::~ShortSleep() = default;

void ShortSleep::sleep(std::chrono::microseconds duration) { std::this_thread::sleep_for(duration); }

void name_this_thread([[maybe_unused]] const char* name) {
#ifdef __linux__
  pthread_setname_np(pthread_self(), name);  // winlint: ok
#endif
}

#endif

}  // namespace gpuprefetch
