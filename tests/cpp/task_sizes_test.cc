// Contract of Division in experts/run/task_sizes.h: every pair is in exactly one task, in order, and no task is too
// long.
#include "experts/run/task_sizes.h"

#include <cstdio>
#include <cstdlib>

using tandem::Division;

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                               \
    }                                                                             \
  } while (0)

namespace {

// Returns the size of the longest task.
int64_t check(const Division& division, int64_t pairs, int64_t most) {
  int64_t next = 0, longest = 0;
  for (int64_t task = 0; task < division.tasks(); ++task) {
    const auto [begin, end] = division.at(task);
    CHECK(begin == next && end > begin && end - begin <= most);
    longest = std::max(longest, end - begin);
    next = end;
  }
  CHECK(next == pairs);
  return longest;
}

void guided_tasks_become_shorter(int64_t pairs, int64_t pair_bytes, int64_t workers, int64_t most) {
  const Division division = Division::guided(pairs, pair_bytes, workers, most);
  check(division, pairs, most);
  int64_t before = most;
  for (int64_t task = 0; task < division.tasks(); ++task) {
    const auto [begin, end] = division.at(task);
    CHECK(end - begin <= before);
    before = end - begin;
  }
  // The last tasks are short, so that nobody is waited for: a pair, or as many as make 32 KiB.
  if (pairs > 4 * workers) CHECK(before * pair_bytes <= std::max<int64_t>(pair_bytes, 32 * 1024));
}

}  // namespace

int main() {
  for (int64_t pairs : {0, 1, 2, 7, 48, 384, 512, 1792, 6144, 100000})
    for (int64_t pair_bytes : {64, 13824, 36864, 131072})
      for (int64_t workers : {1, 2, 3, 16, 64})
        for (int64_t most : {1, 8, 16}) guided_tasks_become_shorter(pairs, pair_bytes, workers, most);
  for (int64_t parts : {0, 1, 5, 128})
    for (int64_t of_part : {0, 1, 24, 48, 53})
      for (int64_t most : {1, 7, 8, 16})
        CHECK(check(Division::equal(parts, of_part, most), parts * of_part, most) <= std::max<int64_t>(of_part, 0));
  const Division even = Division::equal(2, 53, 16);  // 14, 14, 14 and 11, not 16, 16, 16 and 5
  CHECK(even.tasks() == 8 && even.at(2).end == 42 && even.at(3).end == 53 && even.at(4).end == 67);
  std::puts("task_sizes_test: ok");
}
