// How long the runs of a batch are, and what each thread fills of them.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <numeric>
#include <vector>

#include "check.h"
#include "runs.h"

namespace gpuprefetch {
namespace {

constexpr std::size_t kPiece = 16 * kLeastRun;
constexpr std::size_t kThreads[] = {1, 2, 3, 8};

std::vector<std::size_t> runs_of(std::size_t total, std::size_t piece, std::size_t threads) {
  std::vector<std::size_t> runs;
  for (std::size_t done = 0; done < total; done += runs.back()) {
    runs.push_back((std::min)(run_bytes(done, total, piece, threads), total - done));
    CHECK_GE(runs.back(), 1);
    CHECK_LE(runs.back(), piece);
  }
  return runs;
}

std::size_t parts_of(std::size_t run, std::size_t threads) {
  const std::size_t part = part_bytes(run, threads);
  return (run + part - 1) / part;
}

void runs_add_up_and_fit_a_piece() {
  for (std::size_t threads : kThreads) {
    for (std::size_t piece : {std::size_t{1}, std::size_t{512}, kLeastRun - 1, kLeastRun, kLeastRun + 1, kPiece}) {
      for (std::size_t total : {std::size_t{0}, std::size_t{1}, piece - 1, piece, piece + 1, 37 * piece + 5}) {
        current_case = static_cast<std::int64_t>(total);
        const auto runs = runs_of(total, piece, threads);
        CHECK_EQ(std::accumulate(runs.begin(), runs.end(), std::size_t{0}), total);
      }
    }
  }
}

void small_batches_are_cut_into_least_runs() {
  CHECK_EQ(runs_of(1, kPiece, 2).size(), 1);
  CHECK_EQ(runs_of(kLeastRun, kPiece, 2).size(), 1);
  CHECK_EQ(runs_of(kLeastRun + 1, kPiece, 2).size(), 2);
  CHECK_EQ(runs_of(8 * kLeastRun, kPiece, 1).size(), 8);
  CHECK_EQ(runs_of(8 * kLeastRun, kPiece, 2).size(), 8);
}

// So that each has a part that is worth waking it for.
void more_threads_have_longer_least_runs() {
  CHECK_EQ(least_run(8), 8 * kLeastPart);
  CHECK_EQ(run_bytes(0, 500 * kPiece, kPiece, 8), least_run(8));
  CHECK_EQ(runs_of(64 * kLeastPart, kPiece, 8).size(), 8);
}

// A small ring has pieces shorter than a least run: then all runs are pieces.
void small_pieces_are_filled() {
  const std::size_t piece = kLeastRun / 2;
  CHECK(runs_of(20 * piece, piece, 8) == std::vector<std::size_t>(20, piece));
}

void runs_double_up_to_a_share_of_the_batch() {
  for (std::size_t threads : kThreads) {
    for (std::size_t longest : {kPiece / 4, kPiece / 2, kPiece}) {
      const auto runs = runs_of(kRunsABatch * longest, kPiece, threads);
      const auto first = std::find(runs.begin(), runs.end(), longest);
      CHECK(first != runs.end());
      std::size_t done = runs.front();
      for (auto run = runs.begin() + 1; run < first; ++run) {
        CHECK_EQ(*run, done);
        done += *run;
      }
      CHECK(std::all_of(first, runs.end() - 1, [&](std::size_t run) { return run == longest; }));
      // What growing costs, however large the batch.
      CHECK_LE(runs.size(), kRunsABatch + 6);
    }
  }
  CHECK_EQ(run_bytes(500 * kPiece, 1000 * kPiece, kPiece, 8), kPiece);
}

// Whatever lies before it: a leaf may have any length.
void runs_begin_at_whole_steps_of_a_destination() {
  CHECK_EQ(run_bytes(2 * kLeastRun + 77, 500 * kPiece, kPiece, 2), 2 * kLeastRun);
  CHECK_EQ(run_bytes(500 * kPiece, 20 * kPiece + 77, kPiece, 2) % kRunStep, 0);
}

void threads_fill_equal_parts_of_a_run() {
  CHECK_EQ(part_bytes(8 * kLeastPart, 8), kLeastPart);
  CHECK_EQ(part_bytes(16 * kLeastPart, 8), 2 * kLeastPart);
  CHECK_EQ(parts_of(16 * kLeastPart + 1, 8), 8);
  CHECK_EQ(parts_of(kPiece - 1, 3), 3);
  CHECK_EQ(parts_of(kPiece, 1), 1);
  CHECK_EQ(part_bytes(kPiece + 1, 3) % kRunStep, 0);
}

// But for what rounding takes from the last one.
void no_part_is_too_short_to_wake_a_thread_for() {
  CHECK_EQ(parts_of(1, 8), 1);
  CHECK_EQ(parts_of(2 * kLeastPart - 1, 8), 1);
  for (std::size_t threads = 1; threads <= 12; ++threads) {
    for (std::size_t run = kLeastPart; run < 3 * kPiece; run += 12345) {
      current_case = static_cast<std::int64_t>(run);
      const std::size_t parts = parts_of(run, threads);
      CHECK_LE(parts, threads);
      CHECK_GE(run - (parts - 1) * part_bytes(run, threads) + parts * kRunStep, kLeastPart);
    }
  }
}

// Each has a part of every run that is long enough.
void a_run_has_a_part_for_each_thread() {
  for (std::size_t threads : kThreads) {
    std::vector<std::byte> from(20 * kPiece + 77), to(from.size());
    const std::vector<Destination> destinations{{to.data(), to.size(), {Extent{from.data(), 0, from.size()}}}};
    Cutter cutter(destinations, kPiece, threads);
    std::size_t done = 0;
    while (!cutter.empty()) {
      const std::size_t bytes = cutter.bytes();
      const Run run = cutter.cut(bytes, from.data());
      CHECK(run.to == to.data() + done);
      CHECK_EQ(run.bytes, bytes);
      done += bytes;
      if (!cutter.empty()) CHECK_EQ(run.job.parts.size(), (std::min)(threads, bytes / kLeastPart));
      std::size_t filled = 0;
      for (const auto& part : run.job.parts) {
        for (const auto& copy : part) filled += copy.row_bytes * copy.rows;
      }
      CHECK_EQ(filled, bytes);
    }
    CHECK_EQ(done, to.size());
  }
}

}  // namespace
}  // namespace gpuprefetch

int main() {
  using namespace gpuprefetch;
  Watchdog watchdog(std::chrono::seconds(60));
  RUN(runs_add_up_and_fit_a_piece);
  RUN(small_batches_are_cut_into_least_runs);
  RUN(more_threads_have_longer_least_runs);
  RUN(small_pieces_are_filled);
  RUN(runs_double_up_to_a_share_of_the_batch);
  RUN(runs_begin_at_whole_steps_of_a_destination);
  RUN(threads_fill_equal_parts_of_a_run);
  RUN(no_part_is_too_short_to_wake_a_thread_for);
  RUN(a_run_has_a_part_for_each_thread);
}
