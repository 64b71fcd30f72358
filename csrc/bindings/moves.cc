#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "experts/expert_moves.h"

namespace nb = nanobind;

namespace tandem {
namespace {

using ExchangeTuple = std::tuple<int, int, int, int>;

void add_layer(MovingLayers& self, std::shared_ptr<ExpertLayer> cpu, nb::handle slot_of, uint64_t slots,
               int64_t slot_count) {
  const TensorView entries = view_of(slot_of, "slot_of", {Element::i32}, {cpu->shape().experts}, true);
  self.add({std::move(cpu), static_cast<int32_t*>(entries.data), slots, slot_count});
}

void make_moves(ExpertMoves* self, std::shared_ptr<MovingLayers> layers, uintptr_t copy,
                const std::vector<ExchangeTuple>& exchanges, const std::vector<uint64_t>& stages) {
  if (exchanges.size() != stages.size()) throw KernelError("each exchange needs a stage");
  std::vector<ExpertMoves::Exchange> made;
  for (size_t i = 0; i < stages.size(); ++i) {
    const auto [layer, slot, leaving, coming] = exchanges[i];
    made.push_back({layer, slot, leaving, coming, stages[i]});
  }
  new (self) ExpertMoves(std::move(layers), reinterpret_cast<CopyAsync>(copy), std::move(made));
}

void* stream_of(uintptr_t handle) { return reinterpret_cast<void*>(handle); }

nb::list troubles_of(ExpertMoves& self) {
  static constexpr const char* kFates[] = {"dropped", "stranded", "done"};
  nb::list made;
  for (const ExpertMoves::Trouble& t : self.troubles())
    made.append(nb::make_tuple(t.index, kFates[int(t.fate)], t.keeps_stage, t.ends_layer, t.why));
  return made;
}

int copy_async(uintptr_t copy, uint64_t source, uint64_t target, uint64_t bytes, uintptr_t stream) {
  return reinterpret_cast<CopyAsync>(copy)(target, source, size_t(bytes), stream_of(stream));
}

}  // namespace

void bind_moves(nb::module_& m) {
  nb::class_<MovingLayers>(m, "MovingLayers",
                           "Both sides of layers whose experts move, see csrc/experts/expert_moves.h.")
      .def(nb::init<>())
      .def("add", &add_layer, nb::arg("cpu"), nb::arg("slot_of"), nb::arg("slots"), nb::arg("slot_count"),
           nb::keep_alive<1, 3>(), "slot_of int32 [experts] is changed in place.")
      .def("add_none", [](MovingLayers& self) { self.add({}); }, "A layer that lives on one side only.");
  nb::class_<ExpertMoves>(m, "ExpertMoves", "Exchanges that travel and end together.")
      .def("__init__", &make_moves, nb::arg("layers"), nb::arg("copy"), nb::arg("exchanges"), nb::arg("stages"))
      .def(
          "begin",
          [](ExpertMoves& self, uintptr_t up, uintptr_t down) { return self.begin(stream_of(up), stream_of(down)); },
          nb::arg("up"), nb::arg("down"), "Returns the bytes given.")
      .def("lose", &ExpertMoves::lose, nb::arg("why"))
      .def("settle", &ExpertMoves::settle)
      .def("undo", &ExpertMoves::undo, nb::arg("why"))
      .def(
          "place", [](ExpertMoves& self, uintptr_t stream) { self.place(stream_of(stream)); }, nb::arg("stream"))
      .def("strand", &ExpertMoves::strand, nb::arg("why"))
      .def("forget", &ExpertMoves::forget)
      .def("troubles", &troubles_of, "(index, what became of it, keeps its stage, ends its layer, why) of each.");
  m.def("copy_async", &copy_async, nb::arg("copy"), nb::arg("source"), nb::arg("target"), nb::arg("bytes"),
        nb::arg("stream"), "Calls CUDA's cuMemcpyAsync at the address `copy`; 0, or its error.");
}

}  // namespace tandem
