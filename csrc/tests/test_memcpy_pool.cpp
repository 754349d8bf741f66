// MemcpyPool: every byte arrives, parts begin in order, and no job is touched after finish() or cancel().
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
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

}  // namespace
}  // namespace gpuprefetch

int main() {
  using namespace gpuprefetch;
  Watchdog watchdog(std::chrono::seconds(120));
  RUN(jobs_begin_in_the_order_of_their_start);
  RUN(several_threads_leave_out_no_part);
  RUN(without_threads_the_caller_copies);
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
}
