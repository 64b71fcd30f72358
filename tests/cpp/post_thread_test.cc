// Three threads: one answers posts, one is the step's, and one plays the GPU. Steps have many posts, and work on both
// sides between them. They are given up at any moment, or ended. One has posts whose number nobody knows. Meant for the
// thread sanitizer. The words, such as `done`, are those of experts/handoff/mailbox.h.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>

#include "abi/tiers.h"
#include "experts/handoff/post_thread.h"
#include "runtime/tiers.h"

namespace tandem {
// Only the scalar tier's vectors are linked, and no dense kernels.
const DenseKernels& widest_kernels() { std::abort(); }
}  // namespace tandem

namespace {

using namespace tandem;

constexpr int kHidden = 32, kWidth = 16, kTopK = 2, kExperts = 3, kTokens = 2;
constexpr double kPatience = 60;

std::shared_ptr<ExpertStore> layer_of(std::shared_ptr<WorkerPool> pool) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const WeightFormat format{Format::f32, 0, ScaleType::f32};
  auto layer = std::make_shared<ExpertStore>(
      std::make_shared<Workspace>(std::move(pool), kScalarVectors),
      ExpertShape{kExperts, kHidden, kWidth, format, format, {ActivationKind::silu, 0.0f, 0.0f}});
  for (int expert = 0; expert < kExperts; ++expert) {
    std::vector<float> numbers(kWidth * kHidden);
    for (float& x : numbers) x = normal(random);
    layer->load(expert, {MatrixSource{numbers.data(), DType::f32, kWidth, kHidden},
                         {numbers.data(), DType::f32, kWidth, kHidden},
                         {numbers.data(), DType::f32, kHidden, kWidth}});
  }
  return layer;
}

// Hands itself to and fro between the two threads, as exchanges of experts do.
class Shuttle final : public Meanwhile {
 public:
  int64_t crossings() const { return value_; }

 private:
  Progress piece() noexcept override { return cross(1); }
  Progress piece_of_step() noexcept override { return cross(0); }

  Progress cross(uint32_t mine) {
    if (turn_.load(std::memory_order_acquire) % 2 != mine) return Progress::waits;
    ++value_;
    turn_.fetch_add(1, std::memory_order_release);
    return Progress::did;
  }

  std::atomic<uint32_t> turn_{0};
  int64_t value_ = 0;  // whose turn it is
};

struct Setting {
  Setting() : at(mailbox_offsets(shape)), memory(size_t(at.bytes + 128)) {
    first = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128;
    mailbox = std::make_shared<Mailbox>(first, shape);
    mailbox->add(layer_of(std::make_shared<WorkerPool>(std::vector<int>{-1, -1}, 20)));
    thread = std::make_unique<PostThread>(mailbox);
  }

  std::atomic_ref<uint32_t> word(int index) {
    return std::atomic_ref<uint32_t>(reinterpret_cast<uint32_t*>(first)[index]);
  }

  // As the kernels: false once no answer will come.
  bool post() {
    auto* const x = reinterpret_cast<uint16_t*>(first + at.x);
    for (int i = 0; i < kTokens * kHidden; ++i) x[i] = 0x3f80;
    auto* const ids = reinterpret_cast<int32_t*>(first + at.ids);
    auto* const weights = reinterpret_cast<float*>(first + at.weights);
    for (int i = 0; i < kTokens * kTopK; ++i) ids[i] = i % kExperts, weights[i] = 1.0f;
    word(1).store(0);
    word(2).store(kTokens);
    word(0).store(++number, std::memory_order_release);
    while (word(32).load(std::memory_order_acquire) != number)
      if (word(64).load(std::memory_order_acquire)) return false;
    return reinterpret_cast<const float*>(first + at.result)[0] != 0.0f;
  }

  void reset() {
    mailbox->reset();
    number = 0;
  }

  const MailboxShape shape{kTokens, kHidden, kTopK};
  MailboxOffsets at;
  std::vector<uint8_t> memory;
  uint8_t* first;
  uint32_t number = 0;
  std::shared_ptr<Mailbox> mailbox;
  std::unique_ptr<PostThread> thread;
};

bool steps_are_answered() {
  Setting s;
  int64_t crossings = 0;  // of all steps: in one the step's thread may get no CPU before it is over
  for (int step = 0; step < 40; ++step) {
    bool right = true;
    const auto work = std::make_shared<Shuttle>();
    s.thread->begin(20, kPatience);
    s.mailbox->meanwhile(work);
    std::thread gpu([&] {
      for (int i = 0; i < 20; ++i) {
        right &= s.post();
        if (i % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
    s.thread->finish();
    gpu.join();
    if (!right || s.mailbox->has_work()) return false;
    crossings += work->crossings();
  }
  return s.mailbox->posts() == 800 && crossings > 0;
}

bool steps_may_be_given_up() {
  Setting s;
  for (int step = 0; step < 40; ++step) {
    s.thread->begin(1000000, kPatience);
    std::thread gpu([&] {
      while (s.post()) {
      }
    });
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(50 * step));
      s.thread->cancel();
    });
    bool thrown = false;
    try {
      s.thread->finish();
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    gpu.join();
    other.join();
    if (!thrown) return false;
    s.reset();
  }
  return true;
}

bool nobody_knows_how_many() {
  Setting s;
  bool right = true;
  s.thread->begin(kUntilStopped, 0);
  std::thread gpu([&] {
    for (int i = 0; i < 100; ++i) right &= s.post();
    s.thread->stop();
  });
  s.thread->finish();
  gpu.join();
  return right && s.mailbox->posts() == 100;
}

bool ends_with_a_step_under_way() {
  for (int i = 0; i < 20; ++i) {
    Setting s;
    s.thread->begin(i % 2 ? kUntilStopped : 5, kPatience);
    if (i % 4 < 2) s.thread->end();
  }
  return true;
}

int failed(const char* what) {
  std::fprintf(stderr, "post_thread_test: %s\n", what);
  return 1;
}

}  // namespace

int main() {
  if (!steps_are_answered()) return failed("a step was not answered");
  if (!steps_may_be_given_up()) return failed("a step was not given up");
  if (!nobody_knows_how_many()) return failed("posts were not answered until stopped");
  if (!ends_with_a_step_under_way()) return failed("does not end");
  std::puts("post_thread_test: ok");
}
