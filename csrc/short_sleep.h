// A sleep of well under a millisecond, on every platform. Standard library and Win32 only.
#pragma once

#include <chrono>

namespace gpuprefetch {

// Sleeps about that long. On Windows the scheduler's tick is 15.6 ms and a plain sleep lasts at least one; there a
// high-resolution timer is used (Windows 10 1803 and later).
void short_sleep(std::chrono::microseconds duration);

}  // namespace gpuprefetch
