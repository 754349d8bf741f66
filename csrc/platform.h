// What the standard library has no word for. Standard library, Win32 and POSIX.
#pragma once

#include <chrono>

namespace gpuprefetch {

// Sleeps of well under a millisecond. On Windows the scheduler's tick is 15.6 ms and a plain sleep lasts at least one;
// there a high-resolution timer is used (Windows 10 1803 and later).
class ShortSleep {
 public:
  ShortSleep();
  ShortSleep(const ShortSleep&) = delete;  // owns a timer
  ShortSleep& operator=(const ShortSleep&) = delete;
  ~ShortSleep();

  // About that long. On an older Windows it returns at once: better to look again than a tick too late.
  void sleep(std::chrono::microseconds duration);

 private:
  void* timer_ = nullptr;  // a HANDLE
};

// Gives the calling thread a name for debuggers and profilers: ASCII, at most 15 characters. Where the system knows no
// such names it does nothing.
void name_this_thread(const char* name);

}  // namespace gpuprefetch
