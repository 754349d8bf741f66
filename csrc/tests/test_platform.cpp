// Short sleeps and thread names.
#include <chrono>
#include <string>
#include <thread>

#include "check.h"
#include "platform.h"

#ifdef _WIN32
#ifndef NOMINMAX
#define NOMINMAX
#endif
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h>  // winlint: ok
#elif defined(__linux__)
#include <pthread.h>  // winlint: ok
#endif

namespace gpuprefetch {
namespace {

// The calling thread's name as the system has it, or what is expected where it can't be asked.
std::string own_name([[maybe_unused]] const std::string& expected) {
#ifdef _WIN32
  using GetThreadDescription = HRESULT(WINAPI*)(HANDLE, PWSTR*);
  const FARPROC address = GetProcAddress(GetModuleHandleW(L"KernelBase.dll"), "GetThreadDescription");
  GetThreadDescription get = nullptr;
  std::memcpy(&get, &address, sizeof(get));
  PWSTR wide = nullptr;
  if (get == nullptr || get(GetCurrentThread(), &wide) < 0) return expected;
  std::string name;
  for (const wchar_t* c = wide; *c != 0; ++c) name.push_back(static_cast<char>(*c));
  LocalFree(wide);
  return name;
#elif defined(__linux__)
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof(name));  // winlint: ok
  return name;
#else
  return expected;
#endif
}

void a_thread_has_the_name_that_it_was_given() {
  std::string name;
  std::thread thread([&] {
    name_this_thread("fifteen letters");
    name = own_name("fifteen letters");
  });
  thread.join();
  CHECK(name == "fifteen letters");
  CHECK(own_name("") != "fifteen letters");
}

void a_sleep_ends_and_is_not_too_short() {
  ShortSleep short_sleep;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) short_sleep.sleep(std::chrono::microseconds(500));
  const auto took = std::chrono::steady_clock::now() - start;
#ifndef _WIN32  // an older Windows does not sleep at all
  CHECK(took >= std::chrono::milliseconds(10));
#endif
  CHECK(took < std::chrono::seconds(20));
}

}  // namespace
}  // namespace gpuprefetch

int main() {
  using namespace gpuprefetch;
  Watchdog watchdog(std::chrono::seconds(60));
  RUN(a_thread_has_the_name_that_it_was_given);
  RUN(a_sleep_ends_and_is_not_too_short);
  return 0;
}
