#include "host_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define GPUPREFETCH_STREAMS
#endif

namespace gpuprefetch {
namespace {

// Shorter ones, of which a pack has many, are soon overtaken by what begins and ends a stream.
constexpr std::size_t kLeastStreamed = 4 << 10;
constexpr std::size_t kCacheLine = 64;
// How far ahead lines of the source are asked for: processors don't do so beyond the end of a page.
constexpr std::size_t kPrefetchedLines = (4 << 10) / kCacheLine;

#ifdef GPUPREFETCH_STREAMS

// GCC's sanitizers see no streaming store: beside one they would find neither a race nor an overflow.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
void store(__m128i* to, __m128i value) { _mm_store_si128(to, value); }
#else
void store(__m128i* to, __m128i value) { _mm_stream_si128(to, value); }
#endif

// memcpy() reads each line of its destination into the cache before it writes to it, up to lengths that no run has. No
// processor will read what is staged here, so it need not be there.
void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes) {
  const std::size_t head = (kCacheLine - reinterpret_cast<std::uintptr_t>(to) % kCacheLine) % kCacheLine;
  std::memcpy(to, from, head);
  const std::size_t lines = (bytes - head) / kCacheLine;
  auto* line = reinterpret_cast<__m128i*>(to + head);
  const auto* source = reinterpret_cast<const __m128i*>(from + head);
  for (std::size_t i = 0; i < lines; ++i, line += 4, source += 4) {
    if (i + kPrefetchedLines < lines) {
      _mm_prefetch(reinterpret_cast<const char*>(source) + kPrefetchedLines * kCacheLine, _MM_HINT_T0);
    }
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    store(line, a);
    store(line + 1, b);
    store(line + 2, c);
    store(line + 3, d);
  }
  const std::size_t done = head + lines * kCacheLine;
  std::memcpy(to + done, from + done, bytes - done);
}

// Before anybody is told that the bytes are there: a mutex orders other stores only.
void end_streams() { _mm_sfence(); }

#else

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void end_streams() {}

#endif

void copy_row(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes < kLeastStreamed) {
    std::memcpy(to, from, bytes);
  } else {
    copy_past_cache(to, from, bytes);
  }
}

// Rows of a length that the compiler knows take a fraction of the time of those that memcpy() has to look at.
// By value: what is written can't lie over `copy`, so that this need not be read again for each row.
template <std::size_t kRowBytes>
void copy_short_rows(HostCopy copy) {
  for (std::size_t row = 0; row < copy.rows; ++row) {
    std::memcpy(copy.to + row * kRowBytes, copy.from + row * copy.stride, kRowBytes);
  }
}

void copy_rows(const HostCopy& copy) {
  switch (copy.row_bytes) {  // as of single elements
    case 1:
      return copy_short_rows<1>(copy);
    case 2:
      return copy_short_rows<2>(copy);
    case 4:
      return copy_short_rows<4>(copy);
    case 8:
      return copy_short_rows<8>(copy);
    case 16:
      return copy_short_rows<16>(copy);
    default:
      for (std::size_t row = 0; row < copy.rows; ++row) {
        copy_row(copy.to + row * copy.row_bytes, copy.from + row * copy.stride, copy.row_bytes);
      }
  }
}

}  // namespace

void copy_on_host(const std::vector<HostCopy>& copies) {
  for (const auto& copy : copies) {
    if (copy.from == nullptr) {
      std::memset(copy.to, 0, copy.row_bytes * copy.rows);
    } else {
      copy_rows(copy);
    }
  }
  end_streams();
}

}  // namespace gpuprefetch
