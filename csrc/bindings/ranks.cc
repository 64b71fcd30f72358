// Where ranks meet: arrays in, checked, and nothing else.
#include <nanobind/nanobind.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor.h"
#include "runtime/ranks/shm_lane.h"

namespace nb = nanobind;

namespace tandem {
namespace {

struct BoundLane {
  LaneShape shape;
  mutable ShmLane lane;

  void sum(nb::handle rows) const {
    const TensorView view = view_of(rows, "rows", {Element::f32, Element::bf16}, {kAnySize, kAnySize}, true);
    perform(*this, [this, data = view.data, count = view.shape[0] * view.shape[1], type = view.type()] {
      lane.sum(data, count, type);
    });
  }

  void gather(nb::handle own, nb::handle out, int64_t each) const {
    const TensorView to = view_of(out, "out", {Element::byte}, {kAnySize, kAnySize}, true);
    const int64_t rows = to.shape[0], whole = to.shape[1];
    const TensorView from = view_of(own, "own", {Element::byte}, {rows, kAnySize});
    const int64_t held = from.shape[1];
    if (each < 1 || held != std::clamp<int64_t>(whole - shape.rank * each, 0, each) || each * shape.ranks < whole)
      throw KernelError("own: a rank has `each` bytes of a row, and the last ones what is left of `whole`");
    perform(*this, [this, data = static_cast<const uint8_t*>(from.data), out = static_cast<uint8_t*>(to.data), rows,
                    held, each, whole] {
      for (int64_t row = 0; row < rows; ++row) lane.gather(data + row * held, out + row * whole, each, whole);
    });
  }
};

LaneShape shape_of(int rank, int ranks, int64_t bytes) {
  if (ranks < 2 || ranks > kMostRanks || rank < 0 || rank >= ranks) throw KernelError("2 to 64 ranks, and one of them");
  if (bytes < kLaneLine || bytes % kLaneLine != 0) throw KernelError("bytes: whole cache lines");
  return {rank, ranks, bytes};
}

void make_lane(BoundLane* self, nb::handle memory, int rank, int ranks, int64_t bytes, int file, double seconds,
               bool yields, uint32_t call) {
  const LaneShape shape = shape_of(rank, ranks, bytes);
  const TensorView view = view_of(memory, "memory", {Element::byte}, {shared_bytes(shape)}, true);
  if (reinterpret_cast<uintptr_t>(view.data) % 64 != 0) throw KernelError("memory is not aligned to 64 bytes");
  new (self) BoundLane{shape, {static_cast<uint8_t*>(view.data), shape, {seconds, yields}, file, call}};
}

}  // namespace

void bind_ranks(nb::module_& m) {
  nb::class_<BoundLane>(m, "ShmLane", "Sums between processes, see csrc/runtime/ranks/shm_lane.h.")
      .def("__init__", &make_lane, nb::arg("memory"), nb::arg("rank"), nb::arg("ranks"), nb::arg("bytes"),
           nb::arg("file"), nb::arg("seconds"), nb::arg("yields"), nb::arg("call") = 0, nb::keep_alive<1, 2>())
      .def("sum", &BoundLane::sum, nb::arg("rows"), "Over rows [T, n], in place. Raises RankLost.")
      .def("gather", &BoundLane::gather, nb::arg("own"), nb::arg("out"), nb::arg("each"),
           "own [T, bytes of this rank] -> out [T, bytes of all]. Raises RankLost.");
  m.def(
      "shm_lane_bytes", [](int ranks, int64_t bytes) { return shared_bytes(shape_of(0, ranks, bytes)); },
      nb::arg("ranks"), nb::arg("bytes"));
}

}  // namespace tandem
