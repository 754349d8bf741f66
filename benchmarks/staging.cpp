// What staging.py runs: the host's part of a copy, with the bus that it feeds simulated. Prints one JSON object a line.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "host_copy.h"
#include "memcpy_pool.h"
#include "pinned_ring.h"
#include "staged_copy.h"

namespace {

using namespace gpuprefetch;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kSourceBytes = 512 << 20;  // more than a cache holds: each copy begins behind the one before
constexpr std::size_t kLeastCopies = 2;          // in it, of the largest batch
constexpr auto kPause = std::chrono::milliseconds(5);

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// Takes one copy after the other, each for as long as its bytes need; queueing one takes the host a fixed time.
class Bus final : public CopyEngine {
 public:
  Bus(double bytes_per_second, double call_seconds) : rate_(bytes_per_second), call_(call_seconds) {}

  void copy(std::byte*, const std::byte*, std::size_t bytes) override {
    const auto begun = Clock::now();
    if (!first_) first_ = std::make_unique<Clock::time_point>(begun);
    while (seconds(Clock::now() - begun) < call_) {
    }
    const auto ready = (std::max)(Clock::now(), free_);
    free_ = ready + std::chrono::duration_cast<Clock::duration>(
                        std::chrono::duration<double>(static_cast<double>(bytes) / rate_));
    ++copies_;
  }
  void record(Event event) override { *static_cast<Clock::time_point*>(event) = free_; }
  bool query(Event event) override { return Clock::now() >= *static_cast<Clock::time_point*>(event); }
  void synchronize(Event event) override { std::this_thread::sleep_until(*static_cast<Clock::time_point*>(event)); }

  Clock::time_point free() const { return free_; }
  Clock::time_point first() const { return *first_; }
  int copies() const { return copies_; }
  void begin() {
    first_.reset();
    copies_ = 0;
  }

 private:
  const double rate_;
  const double call_;
  Clock::time_point free_{};
  std::unique_ptr<Clock::time_point> first_;
  int copies_ = 0;
};

// Bytes that hold no zero pages, some of them at a time.
class Source {
 public:
  explicit Source(std::size_t largest) : bytes_((std::max)(kSourceBytes, kLeastCopies * largest)) {
    std::memset(bytes_.data(), 1, bytes_.size());
  }
  const std::byte* next(std::size_t bytes) {
    if (position_ + bytes > bytes_.size()) position_ = 0;
    const std::byte* from = bytes_.data() + position_;
    position_ += bytes;
    return from;
  }

 private:
  std::vector<std::byte> bytes_;
  std::size_t position_ = 0;
};

enum class By { kMemcpy, kPool };

// So many threads that copy a share each, all at once: what threads and memory give, without a queue or a bus.
double shares_seconds(By by, int threads, std::size_t bytes, Source& source, std::vector<std::byte>& target) {
  std::this_thread::sleep_for(kPause);
  const std::byte* from = source.next(bytes);
  const std::size_t share = bytes / static_cast<std::size_t>(threads);
  std::atomic<int> waiting{0};
  std::vector<Clock::time_point> ends(static_cast<std::size_t>(threads));
  std::vector<std::thread> copying;
  std::atomic<bool> go{false};
  for (int i = 0; i < threads; ++i) {
    copying.emplace_back([&, i] {
      const std::size_t begin = static_cast<std::size_t>(i) * share;
      ++waiting;
      while (!go) std::this_thread::yield();
      if (by == By::kPool) {
        copy_on_host({{target.data() + begin, from + begin, share}});
      } else {
        std::memcpy(target.data() + begin, from + begin, share);
      }
      ends[static_cast<std::size_t>(i)] = Clock::now();
    });
  }
  while (waiting < threads) std::this_thread::yield();
  const auto begun = Clock::now();
  go = true;
  for (auto& thread : copying) thread.join();
  return seconds(*std::max_element(ends.begin(), ends.end()) - begun);
}

}  // namespace

// staging THREADS RING_BYTES PIECE_BYTES BUS_BYTES_PER_SECOND CALL_SECONDS REPEATS SIZE..
int main(int argc, char** argv) {
  if (argc < 8) return 2;
  const int threads = std::atoi(argv[1]);
  const auto piece = static_cast<std::size_t>(std::atoll(argv[3]));
  const std::size_t pieces = static_cast<std::size_t>(std::atoll(argv[2])) / piece;
  const double rate = std::atof(argv[4]);
  const double call = std::atof(argv[5]);
  const int repeats = std::atoi(argv[6]);

  std::vector<std::byte> memory(pieces * piece, std::byte{1});
  std::vector<Clock::time_point> times(pieces);
  std::vector<Event> events;
  for (auto& time : times) events.push_back(&time);
  std::vector<std::size_t> sizes;
  for (int argument = 7; argument < argc; ++argument) {
    sizes.push_back(static_cast<std::size_t>(std::atoll(argv[argument])));
  }
  Source source(*std::max_element(sizes.begin(), sizes.end()));
  for (const std::size_t bytes : sizes) {
    MemcpyPool pool(threads);
    PinnedRing ring(memory.data(), piece, events);
    Bus bus(rate, call);
    std::vector<std::byte> target(bytes, std::byte{1});
    std::string took, first, plain, alike;
    for (int repeat = -1; repeat < repeats; ++repeat) {
      std::this_thread::sleep_for(kPause);  // as in a training loop: nobody is awake, and the bus is idle
      bus.begin();
      const auto begun = Clock::now();
      staged_copy({Destination{nullptr, bytes, {Extent{source.next(bytes), 0, bytes}}}}, ring, pool, bus);
      const double end = seconds(bus.free() - begun);
      std::this_thread::sleep_until(bus.free());
      double alone[2];
      for (int turn = 0; turn < 2; ++turn) {  // in an order that changes: the second one finds the target in the caches
        const By by = (repeat + turn) % 2 == 0 ? By::kMemcpy : By::kPool;
        alone[static_cast<int>(by)] = shares_seconds(by, threads, bytes, source, target);
      }
      if (repeat < 0) continue;  // first touch
      const char* comma = repeat > 0 ? ", " : "";
      took += comma + std::to_string(end * 1e6);
      first += comma + std::to_string(seconds(bus.first() - begun) * 1e6);
      plain += comma + std::to_string(alone[0] * 1e6);
      alike += comma + std::to_string(alone[1] * 1e6);
    }
    std::printf(
        "{\"threads\": %d, \"bytes\": %zu, \"copies\": %d, \"us\": [%s], \"first_us\": [%s], \"memcpy_us\": [%s], "
        "\"alone_us\": [%s]}\n",
        threads, bytes, bus.copies(), took.c_str(), first.c_str(), plain.c_str(), alike.c_str());
    std::fflush(stdout);
  }
}
