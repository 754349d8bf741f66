// MemcpyPool: every byte arrives, parts begin in order, and no job is touched after finish() or cancel().
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "memcpy_pool.h"

namespace gpuprefetch {
namespace {

// A job with memory of its own. Under AddressSanitizer its end shows whether a thread still uses it.
struct Work {
  Work(std::size_t bytes, std::size_t seed, std::size_t parts = 1) : from(pattern(bytes, seed)), to(bytes) {
    for (std::size_t part = 0; part < parts; ++part) {
      const std::size_t begin = bytes * part / parts;
      const std::size_t end = bytes * (part + 1) / parts;
      const std::size_t middle = (begin + end) / 2;
      job.parts.push_back({{to.data() + begin, from.data() + begin, middle - begin},
                           {to.data() + middle, from.data() + middle, end - middle}});
    }
  }

  // Copies everything that many times, so that the job lasts.
  void repeat(std::size_t times) {
    for (auto& part : job.parts) {
      const auto once = part;
      for (std::size_t i = 1; i < times; ++i) part.insert(part.end(), once.begin(), once.end());
    }
  }

  bool done() const { return to == from; }
  bool untouched() const { return to == Bytes(to.size()); }
  // Whether its first parts are done, whole ones, and no other.
  bool begun_in_order() const {
    for (std::size_t part = 0; part <= job.parts.size(); ++part) {
      const auto begun = static_cast<std::ptrdiff_t>(from.size() * part / job.parts.size());
      Bytes expected(to.size());
      std::copy_n(from.begin(), begun, expected.begin());
      if (to == expected) return true;
    }
    return false;
  }

  Bytes from;
  Bytes to;
  MemcpyPool::Job job;
};

// Each with memory of its own length, so that AddressSanitizer sees a row that is too long; most are not aligned.
void rows_of_every_length_arrive() {
  constexpr std::size_t kRows = 37;
  MemcpyPool pool(0);
  for (std::size_t row_bytes = 1; row_bytes < 70; ++row_bytes) {
    for (const std::size_t stride : {std::size_t{0}, row_bytes / 2, row_bytes, row_bytes + 1, 3 * row_bytes}) {
      current_case = static_cast<std::int64_t>(row_bytes * 1000 + stride);
      const Bytes from = pattern((kRows - 1) * stride + row_bytes, row_bytes);
      Bytes to(kRows * row_bytes + 1);
      MemcpyPool::Job job;
      job.parts.push_back({{to.data() + 1, from.data(), row_bytes, kRows, stride}});
      pool.finish(job);
      Bytes expected(1);
      for (std::size_t row = 0; row < kRows; ++row) {
        const auto begin = from.begin() + static_cast<std::ptrdiff_t>(row * stride);
        expected.insert(expected.end(), begin, begin + static_cast<std::ptrdiff_t>(row_bytes));
      }
      CHECK(to == expected);
    }
  }
}

void load(std::size_t kilobytes) {
  const Bytes from(1024);
  Bytes to(1024);
  for (std::size_t i = 0; i < kilobytes; ++i) {
    std::memcpy(to.data(), from.data(), from.size());
    current_case.load();  // keeps the loop
  }
}

// Each job puts its number before those of the jobs that ran before it. One thread, so that they take turns; the caller
// cancels what has not begun, and so runs none itself.
void jobs_begin_in_the_order_of_their_start() {
  constexpr std::size_t kJobs = 8;
  MemcpyPool pool(1);
  Random random(1);
  bool all = false;
  bool some = false;
  for (std::size_t round = 0; round < 300 || !all || !some; ++round) {
    current_case = static_cast<std::int64_t>(round);
    Bytes history(kJobs + 1);
    Bytes scratch(kJobs);
    Bytes numbers(kJobs);
    Work first(2 << 10, round);
    first.repeat(1 + below(random, 300));  // keeps the thread busy while the others are queued
    std::deque<MemcpyPool::Job> jobs(kJobs);
    for (std::size_t i = 0; i < kJobs; ++i) {
      numbers[i] = static_cast<std::byte>(i + 1);
      jobs[i].parts.push_back({{scratch.data(), history.data(), kJobs},
                               {history.data() + 1, scratch.data(), kJobs},
                               {history.data(), &numbers[i], 1}});
    }
    pool.start(first.job);
    load(below(random, 100));
    for (auto& job : jobs) pool.start(job);
    load(below(random, std::size_t{1} << round % 13));
    for (auto job = jobs.rbegin(); job != jobs.rend(); ++job) pool.cancel(*job);
    pool.cancel(first.job);
    const auto begun = static_cast<std::size_t>(history[0]);
    for (std::size_t i = 0; i <= kJobs; ++i) CHECK_EQ(history[i], i < begun ? begun - i : 0);
    all = all || begun == kJobs;
    some = some || (begun > 0 && begun < kJobs);
  }
}

// Cancelled from the last to the first, what threads have begun is a beginning of what was started.
void several_threads_leave_out_no_part() {
  MemcpyPool pool(3);
  Random random(1);
  for (std::size_t round = 0; round < 300; ++round) {
    current_case = static_cast<std::int64_t>(round);
    std::deque<Work> works;
    for (std::size_t i = 0; i < 8; ++i) works.emplace_back(4 << 10, 8 * round + i, 1 + i % 5);
    for (auto& work : works) work.repeat(1 + below(random, 20));
    for (auto& work : works) pool.start(work.job);
    load(below(random, std::size_t{1} << round % 13));
    for (auto work = works.rbegin(); work != works.rend(); ++work) pool.cancel(work->job);
    std::size_t begun = 0;
    while (begun < works.size() && works[begun].done()) ++begun;
    if (begun < works.size()) CHECK(works[begun++].begun_in_order());
    for (std::size_t i = begun; i < works.size(); ++i) CHECK(works[i].untouched());
  }
}

void without_threads_the_caller_copies() {
  for (int threads : {0, -1}) {
    MemcpyPool pool(threads);
    std::deque<Work> works;
    for (std::size_t i = 0; i < 5; ++i) works.emplace_back(1000 + i, i, 1 + i);
    for (auto& work : works) pool.start(work.job);
    for (std::size_t i : {3, 0, 4, 1, 2}) {
      CHECK(works[i].untouched());
      pool.finish(works[i].job);
      CHECK(works[i].done());
    }
  }
}

void an_empty_job_ends() {
  MemcpyPool pool(1);
  MemcpyPool::Job job;
  pool.finish(job);
  pool.start(job);
  pool.finish(job);
  Work next(100, 1);  // behind which nothing is left of it
  pool.start(next.job);
  while (!pool.is_done(next.job)) std::this_thread::yield();
  CHECK(next.done());
}

// The first part copies, for as long as it takes, a byte that the second writes: it ends with what it had not begun
// with if both ran at once. ThreadSanitizer would see a race in that.
void threads_share_a_job() {
#ifndef __SANITIZE_THREAD__
  MemcpyPool pool(2);
  Bytes copies(1 << 20);
  do {
    Bytes written(1);
    const Bytes one(1, std::byte{1});
    MemcpyPool::Job job;
    job.parts.push_back({{copies.data(), written.data(), 1, copies.size(), 0}});
    job.parts.push_back({{written.data(), one.data(), 1}});
    pool.start(job);
    while (!pool.is_done(job)) std::this_thread::yield();
  } while (copies.front() == copies.back());
#endif
}

void a_job_can_be_started_again() {
  for (int threads : {0, 2}) {
    MemcpyPool pool(threads);
    Work work(4096, 1, 3);
    for (std::size_t round = 2; round < 200; ++round) {
      pool.start(work.job);
      pool.finish(work.job);
      CHECK(work.done());
      const Bytes next = pattern(work.from.size(), round);
      std::memcpy(work.from.data(), next.data(), next.size());
    }
  }
}

void finish_waits_for_a_thread_that_has_begun() {
  MemcpyPool pool(1);
  for (std::size_t round = 0; round < 200; ++round) {
    auto work = std::make_unique<Work>(128 << 10, round, 1 + round % 4);
    pool.start(work->job);
    load(round % 200);
    pool.finish(work->job);
    CHECK(work->done());
    pool.finish(work->job);  // again: no-op
  }
}

void a_job_is_done_when_a_thread_has_copied_it() {
  MemcpyPool pool(1);
  for (std::size_t round = 0; round < 200; ++round) {
    Work work(8 << 10, round, 1 + round % 4);
    CHECK(!pool.is_done(work.job));
    pool.start(work.job);
    while (!pool.is_done(work.job)) std::this_thread::yield();
    CHECK(work.done());
  }
  MemcpyPool none(0);
  Work work(8 << 10, 1);
  none.start(work.job);
  CHECK(!none.is_done(work.job));
  none.finish(work.job);
  CHECK(none.is_done(work.job));
}

// Two wait at once, each for a job of its own, and the job of the second ends first. By cancel(), which does not stay
// awake.
void every_waiting_caller_is_woken() {
  MemcpyPool pool(2);
  for (std::size_t round = 0; round < 50; ++round) {
    Work slow(8 << 10, round);
    Work fast(8 << 10, round);
    slow.repeat(4000);
    fast.repeat(2000);
    pool.start(slow.job);
    pool.start(fast.job);
    load(300);  // so that threads begin both
    std::thread other([&pool, &slow] { pool.cancel(slow.job); });
    load(100 * round);
    pool.cancel(fast.job);
    other.join();
    CHECK(slow.begun_in_order());
    CHECK(fast.begun_in_order());
  }
}

void cancel_in_every_state() {
  MemcpyPool none(0);
  {
    Work idle(100, 1);
    none.cancel(idle.job);
    CHECK(idle.untouched());
  }
  {
    Work queued(100, 2);
    Work next(100, 3);
    none.start(queued.job);
    none.start(next.job);
    none.cancel(queued.job);
    none.finish(queued.job);  // cancelled for good
    CHECK(queued.untouched());
    none.finish(next.job);
    CHECK(next.done());
    none.cancel(next.job);
    none.start(queued.job);  // until started anew
    none.finish(queued.job);
    CHECK(queued.done());
  }
  MemcpyPool pool(2);
  for (std::size_t round = 0; round < 200; ++round) {
    auto running = std::make_unique<Work>(128 << 10, round, 1 + round % 4);
    pool.start(running->job);
    load(round);
    pool.cancel(running->job);
    // A part that has begun runs to its end.
    CHECK(running->begun_in_order());
  }
}

void after_shutdown_the_caller_copies() {
  for (int threads : {0, 1, 3}) {
    MemcpyPool pool(threads);
    std::deque<Work> works;
    for (std::size_t i = 0; i < 40; ++i) works.emplace_back(16 << 10, i, 1 + i % 4);
    for (auto& work : works) pool.start(work.job);
    pool.shutdown();
    pool.shutdown();
    for (std::size_t i = 0; i < works.size(); i += 2) pool.cancel(works[i].job);
    for (std::size_t i = 1; i < works.size(); i += 2) {
      pool.finish(works[i].job);
      CHECK(works[i].done());
    }
    Work late(5000, 99);
    pool.start(late.job);
    CHECK(late.untouched());
    pool.finish(late.job);
    CHECK(late.done());
  }
}

// Four threads, each with several jobs under way, finished and cancelled in any order.
void use(MemcpyPool& pool, std::size_t seed, std::size_t jobs, std::atomic<std::size_t>& ended) {
  Random random(seed);
  std::vector<std::unique_ptr<Work>> works;
  for (std::size_t i = 0; i < jobs || !works.empty();) {
    if (i < jobs && works.size() < 6) {
      const std::size_t bytes = 1 + below(random, below(random, 2) == 0 ? 200 : 60000);
      works.push_back(std::make_unique<Work>(bytes, i, 1 + below(random, 4)));
      pool.start(works.back()->job);
      ++i;
      continue;
    }
    const auto work = works.begin() + static_cast<std::ptrdiff_t>(below(random, works.size()));
    if (below(random, 4) == 0) {
      pool.cancel((*work)->job);
      CHECK((*work)->begun_in_order());
    } else {
      pool.finish((*work)->job);
      CHECK((*work)->done());
    }
    works.erase(work);
    ++ended;
  }
}

void many_jobs_from_several_threads() {
  for (int threads : {0, 1, 4}) {
    MemcpyPool pool(threads);
    std::atomic<std::size_t> ended{0};
    std::vector<std::thread> users;
    for (std::size_t seed = 0; seed < 4; ++seed) {
      users.emplace_back([&pool, &ended, seed] { use(pool, seed, 200, ended); });
    }
    for (auto& user : users) user.join();
    CHECK_EQ(ended, 800);
  }
}

void shutdown_while_in_use() {
  for (std::size_t round = 0; round < 12; ++round) {
    current_case = static_cast<std::int64_t>(round);
    MemcpyPool pool(2);
    std::atomic<std::size_t> ended{0};
    std::vector<std::thread> users;
    for (std::size_t seed = 0; seed < 3; ++seed) {
      users.emplace_back([&pool, &ended, seed] { use(pool, seed, 40, ended); });
    }
    while (ended < 8 * round) std::this_thread::yield();
    pool.shutdown();
    for (auto& user : users) user.join();
    CHECK_EQ(ended, 120);
  }
}

void shutdown_by_several_threads_at_once() {
  for (int round = 0; round < 30; ++round) {
    MemcpyPool pool(3);
    Work work(50000, 1);
    pool.start(work.job);
    std::vector<std::thread> closers;
    for (int i = 0; i < 3; ++i) closers.emplace_back([&pool] { pool.shutdown(); });
    for (auto& closer : closers) closer.join();
    pool.finish(work.job);
    CHECK(work.done());
  }
}

// Around the lengths at which a copy is done in another way, wherever both ends lie in a line of the cache.
void copies_of_any_length_and_place() {
  MemcpyPool pool(1);
  for (std::size_t bytes : {0, 1, 63, 64, 65, 4095, 4096, 4097, 4159, 4160, 4161, 70001}) {
    for (std::size_t shift = 0; shift < 64; shift += 7) {
      for (std::size_t gap : {0, 1, 8, 33}) {
        current_case = static_cast<std::int64_t>(bytes * 10000 + shift * 100 + gap);
        const Bytes from = pattern(bytes + 128, bytes + shift);
        Bytes to(bytes + 256);
        Bytes expected(bytes + 256);
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(gap), bytes,
                    expected.begin() + 64 + static_cast<std::ptrdiff_t>(shift));
        MemcpyPool::Job job;
        job.parts.push_back({{to.data() + 64 + shift, from.data() + gap, bytes}});
        if (shift % 2 == 0) pool.start(job);
        pool.finish(job);
        CHECK(to == expected);
      }
    }
  }
}

// In a process of its own, which a sanitizer is to end: looks at what a thread still copies, and copies beyond the end.
// Whole lines of the cache, since what lies beside them is copied in another way.
void misuse(std::size_t lines) {
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  const std::vector<Line> from(lines, Line{{std::byte{1}}});
  const auto job_to = [&](std::vector<Line>& to) {
    MemcpyPool::Job job;
    job.parts.push_back({{to.data()->bytes, from.data()->bytes, lines * sizeof(Line)}});
    return job;
  };
  {
    MemcpyPool pool(1);
    std::vector<Line> to(lines);
    const volatile std::byte& last = to.back().bytes[0];
    MemcpyPool::Job job = job_to(to);
    pool.start(job);
    while (last == std::byte{0}) std::this_thread::yield();
    pool.finish(job);
  }
  MemcpyPool pool(0);
  std::vector<Line> small(lines - 1);
  MemcpyPool::Job job = job_to(small);
  pool.finish(job);
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
  Watchdog watchdog(std::chrono::seconds(120));
  RUN(jobs_begin_in_the_order_of_their_start);
  RUN(several_threads_leave_out_no_part);
  RUN(without_threads_the_caller_copies);
  RUN(copies_of_any_length_and_place);
  RUN(rows_of_every_length_arrive);
  RUN(an_empty_job_ends);
  RUN(threads_share_a_job);
  RUN(a_job_can_be_started_again);
  RUN(finish_waits_for_a_thread_that_has_begun);
  RUN(a_job_is_done_when_a_thread_has_copied_it);
  RUN(every_waiting_caller_is_woken);
  RUN(cancel_in_every_state);
  RUN(after_shutdown_the_caller_copies);
  RUN(many_jobs_from_several_threads);
  RUN(shutdown_while_in_use);
  RUN(shutdown_by_several_threads_at_once);
  current_test = "sanitizers_see_copies_of_any_length";
  sanitizers_see_copies_of_any_length(arguments[0]);
}
