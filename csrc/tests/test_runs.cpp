// run_bytes: the runs of a batch add up to it, begin and end small, and never exceed a piece.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include "check.h"
#include "runs.h"

namespace gpuprefetch {
namespace {

constexpr std::size_t kPiece = 2 << 20;

std::vector<std::size_t> runs_of(std::size_t total, std::size_t piece) {
  std::vector<std::size_t> runs;
  for (std::size_t done = 0; done < total; done += runs.back()) {
    runs.push_back(run_bytes(done, total, piece));
    CHECK_GE(runs.back(), 1);
    CHECK_LE(runs.back(), piece);
    CHECK_LE(runs.back(), total - done);
  }
  CHECK_EQ(run_bytes(total, total, piece), 0);
  return runs;
}

void runs_add_up_and_fit_a_piece() {
  for (std::size_t piece : {std::size_t{1}, std::size_t{512}, kLeastRun - 1, kLeastRun, kLeastRun + 1, kPiece}) {
    for (std::size_t total : {std::size_t{0}, std::size_t{1}, piece - 1, piece, piece + 1, 3 * piece, 37 * piece + 5}) {
      current_case = static_cast<std::int64_t>(total);
      std::size_t sum = 0;
      for (std::size_t run : runs_of(total, piece)) sum += run;
      CHECK_EQ(sum, total);
    }
  }
}

void small_batches_are_cut_into_least_runs() {
  CHECK_EQ(runs_of(1, kPiece).size(), 1);
  CHECK_EQ(runs_of(kLeastRun, kPiece).size(), 1);
  CHECK_EQ(runs_of(kLeastRun + 1, kPiece).size(), 2);
  CHECK_EQ(runs_of(4 * kLeastRun, kPiece).size(), 4);
  CHECK_EQ(runs_of(8 * kLeastRun, kPiece).size(), 8);
}

// A small ring has pieces shorter than a least run: then all runs are pieces.
void small_pieces_are_filled() {
  const std::size_t piece = kLeastRun / 2;
  const auto runs = runs_of(20 * piece, piece);
  CHECK_EQ(runs.size(), 20);
  CHECK(std::all_of(runs.begin(), runs.end(), [&](std::size_t run) { return run == piece; }));
}

void runs_grow_to_a_piece_and_shrink_again() {
  for (std::size_t total : {32 * kPiece, 32 * kPiece + 12345, 500 * kPiece}) {
    const auto runs = runs_of(total, kPiece);
    CHECK_EQ(runs.front(), kLeastRun);
    CHECK_LE(runs.back(), kLeastRun);
    const auto first = std::find(runs.begin(), runs.end(), kPiece);
    const auto last = std::find(runs.rbegin(), runs.rend(), kPiece).base();
    CHECK(first != runs.end());
    CHECK(std::is_sorted(runs.begin(), first));
    CHECK(std::all_of(first, last, [](std::size_t run) { return run == kPiece; }));
    CHECK(std::is_sorted(runs.rbegin(), runs.rend() - (last - runs.begin())));
    // The ends are a matter of a few pieces, however large the batch: a call has its price.
    std::size_t before = 0, behind = 0;
    for (auto run = runs.begin(); run != first; ++run) before += *run;
    for (auto run = last; run != runs.end(); ++run) behind += *run;
    CHECK_LE(before, (kRunShare + 1) * kPiece);
    CHECK_LE(behind, (kRunShare + 1) * kPiece);
    CHECK_LE(runs.size(), total / kPiece + 24);
  }
}

void runs_but_the_last_are_whole_steps() {
  const auto runs = runs_of(37 * kPiece + 5, kPiece);
  CHECK(std::all_of(runs.begin(), runs.end() - 1, [](std::size_t run) { return run % kRunStep == 0; }));
}

}  // namespace
}  // namespace gpuprefetch

int main() {
  using namespace gpuprefetch;
  Watchdog watchdog(std::chrono::seconds(60));
  RUN(runs_add_up_and_fit_a_piece);
  RUN(small_batches_are_cut_into_least_runs);
  RUN(small_pieces_are_filled);
  RUN(runs_grow_to_a_piece_and_shrink_again);
  RUN(runs_but_the_last_are_whole_steps);
}
