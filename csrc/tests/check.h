// Checks for the C++ tests: a failed one says where and what, and aborts. A watchdog does so instead of hanging.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace gpuprefetch {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

inline std::atomic<const char*> current_test{""};
inline std::atomic<std::int64_t> current_case{0};  // tests with many cases set it, so that a failure names its case

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s (case %s): %s\n", file, line, current_test.load(),
               std::to_string(current_case.load()).c_str(), what.c_str());
  std::fflush(stderr);
  std::abort();
}

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) ::gpuprefetch::fail(__FILE__, __LINE__, #condition); \
  } while (false)

// Compares integers or enumerators of any type.
#define CHECK_OP(left, op, right)                                                                                  \
  do {                                                                                                             \
    const auto left_value = static_cast<std::int64_t>(left);                                                       \
    const auto right_value = static_cast<std::int64_t>(right);                                                     \
    if (!(left_value op right_value)) {                                                                            \
      ::gpuprefetch::fail(                                                                                         \
          __FILE__, __LINE__,                                                                                      \
          #left " " #op " " #right ": " + std::to_string(left_value) + " against " + std::to_string(right_value)); \
    }                                                                                                              \
  } while (false)
#define CHECK_EQ(left, right) CHECK_OP(left, ==, right)
#define CHECK_LE(left, right) CHECK_OP(left, <=, right)
#define CHECK_GE(left, right) CHECK_OP(left, >=, right)

// Whether the call ends by such an error.
template <typename Error, typename Call>
bool throws(Call call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

// Ends the process when it is still there after `limit`.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds limit)
      : thread_([this, limit] {
          std::unique_lock<std::mutex> lock(mutex_);
          if (!changed_.wait_for(lock, limit, [this] { return ended_; })) fail(__FILE__, __LINE__, "this hangs");
        }) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::thread thread_;
};

inline void run_test(const char* name, void (*test)()) {
  current_test = name;
  current_case = 0;
  const auto start = std::chrono::steady_clock::now();
  test();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%7.2f s  %s\n", seconds.count(), name);
  std::fflush(stdout);
}
#define RUN(test) ::gpuprefetch::run_test(#test, test)

// Bytes that depend on the seed, no two neighbouring words alike.
inline Bytes pattern(std::size_t bytes, std::size_t seed) {
  static_assert(sizeof(seed) == 8, "the generator below is one of 64 bits");
  Bytes result(bytes);
  std::size_t word = seed * 0x9E3779B97F4A7C15u + 1;
  for (std::size_t i = 0; i < bytes; i += sizeof(word)) {
    word = word * 6364136223846793005u + 1442695040888963407u;
    const std::size_t mixed = word ^ (word >> 33);  // the low bits of `word` alone repeat soon
    std::memcpy(result.data() + i, &mixed, bytes - i < sizeof(word) ? bytes - i : sizeof(word));
  }
  return result;
}

inline std::size_t below(Random& random, std::size_t end) { return static_cast<std::size_t>(random() % end); }

}  // namespace gpuprefetch
