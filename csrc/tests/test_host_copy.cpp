// copy_on_host(): every byte arrives, at any length and place, and no other is touched.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "host_copy.h"

namespace gpuprefetch {
namespace {

// Each with memory of its own length, so that AddressSanitizer sees a row that is too long; most are not aligned.
void rows_of_every_length_arrive() {
  constexpr std::size_t kRows = 37;
  for (std::size_t row_bytes = 1; row_bytes < 70; ++row_bytes) {
    for (const std::size_t stride : {std::size_t{0}, row_bytes / 2, row_bytes, row_bytes + 1, 3 * row_bytes}) {
      current_case = static_cast<std::int64_t>(row_bytes * 1000 + stride);
      const Bytes from = pattern((kRows - 1) * stride + row_bytes, row_bytes);
      Bytes to(kRows * row_bytes + 1);
      copy_on_host({{to.data() + 1, from.data(), row_bytes, kRows, stride}});
      Bytes expected(1);
      for (std::size_t row = 0; row < kRows; ++row) {
        const auto begin = from.begin() + static_cast<std::ptrdiff_t>(row * stride);
        expected.insert(expected.end(), begin, begin + static_cast<std::ptrdiff_t>(row_bytes));
      }
      CHECK(to == expected);
    }
  }
}

// Around the lengths at which a copy is done in another way, wherever both ends lie in a line of the cache.
void copies_of_any_length_and_place() {
  for (std::size_t bytes : {0, 1, 63, 64, 65, 4095, 4096, 4097, 4159, 4160, 4161, 70001}) {
    for (std::size_t shift = 0; shift < 64; shift += 7) {
      for (std::size_t gap : {0, 1, 8, 33}) {
        current_case = static_cast<std::int64_t>(bytes * 10000 + shift * 100 + gap);
        const Bytes from = pattern(bytes + 128, bytes + shift);
        Bytes to(bytes + 256);
        Bytes expected(bytes + 256);
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(gap), bytes,
                    expected.begin() + 64 + static_cast<std::ptrdiff_t>(shift));
        copy_on_host({{to.data() + 64 + shift, from.data() + gap, bytes}});
        CHECK(to == expected);
      }
    }
  }
}

void one_behind_the_other_and_zeros() {
  const Bytes from = pattern(300, 1);
  Bytes to(300, std::byte{7});
  Bytes between(300);
  copy_on_host(
      {{between.data(), from.data(), 300}, {to.data(), between.data(), 200}, {to.data() + 50, nullptr, 10, 3}});
  Bytes expected(300, std::byte{7});
  std::copy_n(from.begin(), 200, expected.begin());
  std::fill_n(expected.begin() + 50, 30, std::byte{0});
  CHECK(to == expected);
}

// In a process of its own, which a sanitizer is to end: looks at what a thread still copies, and copies beyond the end.
// Whole lines of the cache, since what lies beside them is copied in another way.
void misuse(std::size_t lines) {
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  const std::vector<Line> from(lines, Line{{std::byte{1}}});
  const auto copy_to = [&](std::vector<Line>& to) {
    copy_on_host({{to.data()->bytes, from.data()->bytes, lines * sizeof(Line)}});
  };
  std::vector<Line> to(lines);
  const volatile std::byte& last = to.back().bytes[0];
  std::thread copying([&] { copy_to(to); });
  while (last == std::byte{0}) std::this_thread::yield();
  copying.join();
  std::vector<Line> small(lines - 1);
  copy_to(small);
}

// Else all the other tests would pass, whatever a copy does.
void sanitizers_see_copies_of_any_length(const std::string& program) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  CHECK_EQ(std::system((program + " 0 2>&1").c_str()), 0);
  for (int lines : {16, 64, 2000}) {
    current_case = lines;
    CHECK(std::system((program + " " + std::to_string(lines) + " 2>/dev/null").c_str()) != 0);
  }
#else
  static_cast<void>(program);
#endif
}

}  // namespace
}  // namespace gpuprefetch

int main(int count, char** arguments) {
  using namespace gpuprefetch;
  if (count > 1) {
    const auto lines = static_cast<std::size_t>(std::atoi(arguments[1]));
    if (lines > 0) misuse(lines);
    return 0;
  }
  Watchdog watchdog(std::chrono::seconds(60));
  RUN(copies_of_any_length_and_place);
  RUN(rows_of_every_length_arrive);
  RUN(one_behind_the_other_and_zeros);
  current_test = "sanitizers_see_copies_of_any_length";
  sanitizers_see_copies_of_any_length(arguments[0]);
}
