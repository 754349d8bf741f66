// Rows: they are the elements of a strided tensor in the order of dense memory, and as long as they can be.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "check.h"
#include "rows.h"

namespace gpuprefetch {
namespace {

using Integers = std::vector<std::int64_t>;

constexpr std::size_t kItem = 4;

// Where each element lies, in the order in which they lie in dense memory: by looking at every place of it.
std::vector<std::size_t> elements(const Integers& sizes, const Integers& from_strides, const Integers& to_strides) {
  std::size_t count = 1;
  for (const std::int64_t size : sizes) count *= static_cast<std::size_t>(size);
  std::vector<std::size_t> found(count, 0);
  for (std::size_t n = 0; n < count; ++n) {
    std::int64_t from = 0, to = 0;
    auto rest = static_cast<std::int64_t>(n);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      from += rest % sizes[i] * from_strides[i];
      to += rest % sizes[i] * to_strides[i];
      rest /= sizes[i];
    }
    found[static_cast<std::size_t>(to)] = static_cast<std::size_t>(from) * kItem;
  }
  return found;
}

// Where each row begins.
std::vector<std::size_t> begins(const Rows& rows) {
  std::vector<std::size_t> found;
  rows.each_block([&](std::size_t from, std::size_t count, std::size_t stride) {
    for (std::size_t row = 0; row < count; ++row) found.push_back(from + row * stride);
  });
  return found;
}

std::vector<std::size_t> elements(const Rows& rows) {
  std::vector<std::size_t> found;
  for (const std::size_t begin : begins(rows)) {
    for (std::size_t done = 0; done < rows.row_bytes(); done += kItem) found.push_back(begin + done);
  }
  return found;
}

// Strides of dense memory in that order of dimensions, the one with the longest steps first.
Integers dense(const Integers& sizes, const Integers& order) {
  Integers strides(sizes.size());
  std::int64_t step = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const auto dimension = static_cast<std::size_t>(order[i]);
    strides[dimension] = step;
    step *= sizes[dimension];
  }
  return strides;
}

void check(const Integers& sizes, const Integers& from_strides, const Integers& to_strides, std::size_t rows) {
  const Rows made(sizes, from_strides, to_strides, kItem);
  CHECK_EQ(made.count(), rows);
  const auto found = elements(made);
  const auto expected = elements(sizes, from_strides, to_strides);
  CHECK_EQ(found.size(), expected.size());
  CHECK(found == expected);
}

void dense_tensors_are_one_row() {
  check({}, {}, {}, 1);
  check({7}, {1}, {1}, 1);
  check({2, 3, 4}, {12, 4, 1}, {12, 4, 1}, 1);
  check({2, 3, 4}, {1, 2, 6}, {1, 2, 6}, 1);
  check({1, 4}, {99, 1}, {4, 1}, 1);  // what steps a dimension of one element has does not matter
  check({4, 1, 1}, {1, 7, 0}, {1, 4, 4}, 1);
}

void gaps_end_a_row() {
  check({3, 4}, {8, 1}, {4, 1}, 3);
  check({2, 3, 4}, {24, 4, 1}, {12, 4, 1}, 2);
  check({2, 3, 4}, {12, 4, 2}, {12, 4, 1}, 24);
  check({4, 3}, {1, 8}, {1, 4}, 3);
}

void rows_of_even_steps_are_one_block() {
  const auto blocks = [](const Integers& sizes, const Integers& from_strides, const Integers& to_strides) {
    const Rows rows(sizes, from_strides, to_strides, kItem);
    std::size_t count = 0;
    rows.each_block([&](std::size_t, std::size_t, std::size_t) { ++count; });
    CHECK_EQ(rows.blocks(), count);
    return count;
  };
  CHECK_EQ(blocks({7}, {1}, {1}), 1);
  CHECK_EQ(blocks({1000, 4}, {8, 1}, {4, 1}), 1);
  CHECK_EQ(blocks({5, 1000, 4}, {9000, 8, 1}, {4000, 4, 1}), 5);
  CHECK_EQ(blocks({5, 1000, 4}, {8000, 8, 1}, {4000, 4, 1}), 1);
  CHECK_EQ(blocks({3, 5, 2, 4}, {80, 16, 8, 1}, {40, 8, 4, 1}), 1);
  CHECK_EQ(blocks({3, 5, 2, 4}, {90, 16, 8, 1}, {40, 8, 4, 1}), 3);
  CHECK_EQ(blocks({3, 5, 4}, {0, 0, 1}, {20, 4, 1}), 1);
  CHECK_EQ(blocks({0, 4}, {8, 1}, {4, 1}), 0);
}

void elements_may_be_read_more_than_once() {
  check({4, 3}, {0, 1}, {3, 1}, 4);
  check({4, 3}, {2, 1}, {3, 1}, 4);
  check({4}, {0}, {1}, 4);
}

void tensors_without_elements_have_no_rows() {
  check({0}, {1}, {1}, 0);
  check({3, 0, 2}, {2, 2, 1}, {2, 2, 1}, 0);
  check({0, 5}, {0, 1}, {5, 1}, 0);
}

void strides_of_all_kinds() {
  Random random(1);
  for (int round = 0; round < 3000; ++round) {
    current_case = round;
    const std::size_t dimensions = below(random, 5);
    Integers sizes, strides, order;
    for (std::size_t i = 0; i < dimensions; ++i) {
      sizes.push_back(static_cast<std::int64_t>(below(random, 5)));
      order.push_back(static_cast<std::int64_t>(i));
    }
    for (std::size_t i = dimensions; i > 1; --i) std::swap(order[i - 1], order[below(random, i)]);
    const Integers to = dense(sizes, order);
    for (const std::int64_t stride : to) {
      strides.push_back(below(random, 2) == 0 ? stride : stride * static_cast<std::int64_t>(below(random, 3)));
    }
    const Rows rows(sizes, strides, to, kItem);
    check(sizes, strides, to, rows.count());
    const auto found = begins(rows);
    CHECK_EQ(found.size(), rows.count());
    CHECK(found.size() < 2 || found[1] != found[0] + rows.row_bytes());  // else they would be one
  }
}

}  // namespace
}  // namespace gpuprefetch

int main() {
  using namespace gpuprefetch;
  Watchdog watchdog(std::chrono::seconds(60));
  RUN(dense_tensors_are_one_row);
  RUN(gaps_end_a_row);
  RUN(rows_of_even_steps_are_one_block);
  RUN(elements_may_be_read_more_than_once);
  RUN(tensors_without_elements_have_no_rows);
  RUN(strides_of_all_kinds);
}
