// How a phase's work is cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tandem {

constexpr int64_t kMaxChunkTokens = 4096;   // of a batch that runs at once
constexpr int64_t kShortBytes = 32 * 1024;  // weights of a task of few rows, at least

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A row of pairs of panels, cut into tasks. Which pairs a task has is computed when it is needed: with few tokens, a
// list of tasks would take longer than everything else before the first of them.
class Division {
 public:
  struct Range {
    int64_t begin, end;
  };

  // Few rows are bound by memory, which likes long streams; the end likes short ones, since nobody knows who is slow
  // today. So there is a task of half a worker's share of what is left for every worker, again and again ("factoring":
  // Hummel, Schonberg and Flynn, 1992).
  static Division guided(int64_t pairs, int64_t pair_bytes, int64_t workers, int64_t most) {
    const int64_t least = std::clamp<int64_t>(kShortBytes / pair_bytes, 1, most);
    Division made(pairs, 0);
    for (int64_t left = pairs; left > 0;) {
      const int64_t each = std::clamp<int64_t>(left / (2 * workers), least, most);
      int64_t tasks = workers;
      if (each == most) tasks = std::max(workers, left / most - 2 * workers);
      if (each == least || made.rounds_ == kMostRounds - 1) tasks = ceil_div(left, each);
      left -= made.add(tasks, each, left);
    }
    return made;
  }

  // Many rows: tasks of equal size, of at most `most` pairs, each in one part of so many.
  static Division equal(int64_t parts, int64_t pairs_of_part, int64_t most) {
    const int64_t each = ceil_div(pairs_of_part, std::max<int64_t>(1, ceil_div(pairs_of_part, most)));
    Division made(parts * pairs_of_part, pairs_of_part);
    made.round_[0] = {0, 0, int32_t(each)};
    made.tasks_ = each ? parts * ceil_div(pairs_of_part, each) : 0;
    return made;
  }

  int64_t tasks() const { return tasks_; }

  Range at(int64_t task) const {
    if (part_) return in_part(task, ceil_div(part_, round_[0].each));
    int r = 0;
    while (r + 1 < rounds_ && round_[r + 1].first_task <= task) ++r;
    const int64_t begin = round_[r].first_pair + (task - round_[r].first_task) * round_[r].each;
    return {begin, std::min<int64_t>(begin + round_[r].each, pairs_)};
  }

 private:
  static constexpr int kMostRounds = 12;  // tasks of half the size each, from the most pairs that a call takes to one
  struct Round {
    int64_t first_task, first_pair;
    int32_t each;
  };

  Division(int64_t pairs, int64_t part) : pairs_(pairs), part_(part) {}

  int64_t add(int64_t tasks, int64_t each, int64_t left) {
    tasks = std::min(tasks, ceil_div(left, each));
    round_[rounds_++] = {tasks_, pairs_ - left, int32_t(each)};
    tasks_ += tasks;
    return std::min(left, tasks * each);
  }

  Range in_part(int64_t task, int64_t tasks_of_part) const {
    const int64_t first = task / tasks_of_part * part_, begin = task % tasks_of_part * round_[0].each;
    return {first + begin, first + std::min<int64_t>(begin + round_[0].each, part_)};
  }

  int64_t pairs_, part_;  // part_ 0: guided
  int64_t tasks_ = 0;
  int rounds_ = 0;
  Round round_[kMostRounds];
};

}  // namespace tandem
