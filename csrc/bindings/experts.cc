#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/codes.h"
#include "bindings/names.h"
#include "bindings/recording.h"
#include "bindings/tensor.h"
#include "experts/store/expert_store.h"

namespace nb = nanobind;

namespace tandem {
namespace {

void make_layer(ExpertStore* self, std::shared_ptr<Workspace> workspace, int experts, int hidden, int width,
                const WeightFormat& gate, const WeightFormat& up, const WeightFormat& down,
                const std::string& activation, float alpha, float limit, int cpu_slots, bool int8_activations) {
  const Activation act{activation_named(activation), alpha, limit};
  new (self)
      ExpertStore(std::move(workspace), {experts, hidden, width, gate, up, down, act, cpu_slots, int8_activations});
}

ExpertSource source_of_expert(const ExpertStore& self, nb::handle gate, nb::handle up, nb::handle down,
                              std::array<SourceViews, 3>& views) {
  const int64_t hidden = self.shape().hidden, rows = self.shape().gate_rows();
  return {source_of(gate, "gate", rows, hidden, &views[0]), source_of(up, "up", rows, hidden, &views[1]),
          source_of(down, "down", hidden, self.shape().width, &views[2])};
}

void load(ExpertStore& self, int expert, nb::handle gate, nb::handle up, nb::handle down) {
  std::array<SourceViews, 3> views;
  const ExpertSource source = source_of_expert(self, gate, up, down, views);
  const nb::gil_scoped_release unlocked;
  self.load(expert, source);
}

void set_biases(ExpertStore& self, nb::handle gate, nb::handle up, nb::handle down) {
  const auto floats = [&](nb::handle array, const char* name, int64_t columns) -> const float* {
    if (array.is_none()) return nullptr;
    return static_cast<const float*>(view_of(array, name, {Element::f32}, {self.shape().experts, columns}).data);
  };
  const int64_t rows = self.shape().gate_rows();
  const ExpertBiases biases{floats(gate, "gate biases", rows), floats(up, "up biases", rows),
                            floats(down, "down biases", self.shape().hidden)};
  self.set_biases(biases);
}

// Of tuples of gate, up and down. `views` owns what they are seen through.
std::vector<ExpertSource> sources_of(const ExpertStore& self, const nb::list& experts,
                                     std::vector<std::array<SourceViews, 3>>& views) {
  views.resize(experts.size());
  std::vector<ExpertSource> sources;
  for (size_t i = 0; i < views.size(); ++i) {
    const nb::tuple expert = nb::cast<nb::tuple>(experts[i]);
    if (expert.size() != 3) throw KernelError("an expert is gate, up and down");
    sources.push_back(source_of_expert(self, expert[0], expert[1], expert[2], views[i]));
  }
  return sources;
}

void load_all(ExpertStore& self, const std::vector<int>& ids, const nb::list& experts) {
  std::vector<std::array<SourceViews, 3>> views;
  const std::vector<ExpertSource> sources = sources_of(self, experts, views);
  const nb::gil_scoped_release unlocked;
  self.load_all(ids, sources);
}

// Where whole experts are written, one after the other.
uint8_t* room_for(const ExpertStore& self, size_t experts, nb::handle out, TensorView* view) {
  *view = view_of(out, "out", {Element::byte}, {int64_t(experts) * self.bytes_per_expert()}, true);
  return static_cast<uint8_t*>(view->data);
}

void pack_to(const ExpertStore& self, const nb::list& experts, nb::handle out) {
  std::vector<std::array<SourceViews, 3>> views;
  TensorView to;
  const std::vector<ExpertSource> sources = sources_of(self, experts, views);
  uint8_t* const first = room_for(self, sources.size(), out, &to);
  const nb::gil_scoped_release unlocked;
  self.pack_to(sources, first);
}

void forward(ExpertStore& self, nb::handle x, nb::handle ids, nb::handle weights, nb::handle out, bool add) {
  const int64_t hidden = self.shape().hidden;
  const TensorView in = view_of(x, "x", {Element::bf16, Element::f32}, {kAnySize, hidden});
  const TensorView i = view_of(ids, "ids", {Element::i32}, {in.shape[0], kAnySize});
  const TensorView w = view_of(weights, "weights", {Element::f32}, {in.shape[0], i.shape[1]});
  const TensorView y = view_of(out, "out", {Element::bf16, Element::f32}, {in.shape[0], hidden}, true);
  const ExpertCall call{{in.data, in.type(), in.shape[0], hidden},
                        static_cast<const int32_t*>(i.data),
                        static_cast<const float*>(w.data),
                        i.shape[1],
                        y.data,
                        y.type(),
                        add};
  perform(self, [&self, call] { self.forward(call); });
}

void check_expert(const ExpertStore& self, int expert) {
  if (expert < 0 || expert >= self.shape().experts)
    throw KernelError("there is no expert " + std::to_string(expert) + " in this layer");
}

void load_packed(ExpertStore& self, int expert, nb::handle bytes) {
  check_expert(self, expert);
  const TensorView from = view_of(bytes, "bytes", {Element::byte}, {self.bytes_per_expert()});
  const nb::gil_scoped_release unlocked;
  self.load_packed(expert, static_cast<const uint8_t*>(from.data));
}

void copy_packed(const ExpertStore& self, int expert, nb::handle out) {
  check_expert(self, expert);
  if (!self.is_loaded(expert)) throw KernelError("expert " + std::to_string(expert) + " has not been loaded");
  const TensorView to = view_of(out, "out", {Element::byte}, {self.bytes_per_expert()}, true);
  const nb::gil_scoped_release unlocked;
  self.copy_packed(expert, static_cast<uint8_t*>(to.data));
}

void check_loaded(const ExpertStore& self, const std::vector<int>& experts) {
  for (const int expert : experts) {
    check_expert(self, expert);
    if (!self.is_loaded(expert)) throw KernelError("expert " + std::to_string(expert) + " has not been loaded");
  }
}

void copy_all(const ExpertStore& self, const std::vector<int>& experts, nb::handle out) {
  check_loaded(self, experts);
  TensorView to;
  uint8_t* const first = room_for(self, experts.size(), out, &to);
  const nb::gil_scoped_release unlocked;
  self.copy_all(experts, first);
}

void load_from(ExpertStore& self, const ExpertStore& other, const std::vector<int>& experts) {
  for (const int expert : experts) check_expert(self, expert);
  check_loaded(other, experts);
  const nb::gil_scoped_release unlocked;
  self.load_from(other, experts);
}

void forget(ExpertStore& self, int expert) {
  check_expert(self, expert);
  self.forget(expert);
}

// (offset in the packed bytes, address, bytes)
std::vector<std::tuple<int64_t, uintptr_t, int64_t>> pieces_of(ExpertStore& self, int32_t cpu_slot) {
  std::vector<std::tuple<int64_t, uintptr_t, int64_t>> made;
  for (const ExpertStore::Piece& piece : self.pieces(cpu_slot))
    made.emplace_back(piece.offset, reinterpret_cast<uintptr_t>(piece.here), piece.bytes);
  return made;
}

std::tuple<uintptr_t, int64_t> own_memory_of(const ExpertStore& self) {
  const ByteRange own = self.own();
  return {reinterpret_cast<uintptr_t>(own.data), own.bytes};
}

int32_t reserve(ExpertStore& self, int expert) {
  check_expert(self, expert);
  return self.reserve(expert);
}

void assign(ExpertStore& self, int expert, int32_t cpu_slot) {
  check_expert(self, expert);
  self.assign(expert, cpu_slot);
}

int32_t cpu_slot_of(const ExpertStore& self, int expert) {
  check_expert(self, expert);
  return self.cpu_slot_of(expert);
}

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<ExpertStore>(m, "ExpertStore", "The routed experts of one layer: gated MLPs of equal shape.")
      .def("__init__", &make_layer, nb::arg("workspace"), nb::arg("experts"), nb::arg("hidden"), nb::arg("width"),
           nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("activation"), nb::arg("alpha"), nb::arg("limit"),
           nb::arg("cpu_slots") = 0, nb::arg("int8_activations") = false)
      .def("load", &load, nb::arg("expert"), nb::arg("gate"), nb::arg("up"), nb::arg("down"))
      .def("set_biases", &set_biases, nb::arg("gate").none(), nb::arg("up").none(), nb::arg("down").none(),
           "Of all experts, wherever they live: float32 [experts, rows].")
      .def("load_all", &load_all, nb::arg("ids"), nb::arg("experts"),
           "These experts from tuples of gate, up and down, in one parallel region.")
      .def("pack_to", &pack_to, nb::arg("experts"), nb::arg("out"),
           "What load_all would make of them, one after the other in other memory.")
      .def("forward", &forward, nb::arg("x"), nb::arg("ids"), nb::arg("weights"), nb::arg("out"), nb::arg("add"))
      .def("bytes", &ExpertStore::bytes, nb::arg("first"), nb::arg("count"),
           "Of the experts [first, first + count), for each memory node.")
      .def("read_next", &ExpertStore::read_next, nb::arg("upcoming"),
           "Weights that are read after this layer: idle workers fetch them.")
      .def(
          "layout",
          [](const ExpertStore& self) {
            return nb::make_tuple(layout_of(self.gate_up_layout()), layout_of(self.down_layout()));
          },
          "Of gate_up and down, see layout_of in csrc/bindings/names.h.")
      .def("load_packed", &load_packed, nb::arg("expert"), nb::arg("bytes"), "The inverse of copy_packed.")
      .def("copy_packed", &copy_packed, nb::arg("expert"), nb::arg("out"), "The packed bytes of one expert.")
      .def("copy_all", &copy_all, nb::arg("experts"), nb::arg("out"), "The packed bytes of each, one after the other.")
      .def("load_from", &load_from, nb::arg("other"), nb::arg("experts"), "Copies them out of a layer packed alike.")
      .def("forget", &forget, nb::arg("expert"), "It lives elsewhere from now on; its slot is free.")
      .def("reserve", &reserve, nb::arg("expert"), "A CPU slot for an expert on its way here, which nobody uses yet.")
      .def("assign", &assign, nb::arg("expert"), nb::arg("cpu_slot"), "The expert has arrived in the reserved slot.")
      .def("release", &ExpertStore::release, nb::arg("cpu_slot"), "Nobody comes: the reserved slot is free.")
      .def("cpu_slot_of", &cpu_slot_of, nb::arg("expert"), "The CPU slot that it lies in.")
      .def("pieces", &pieces_of, nb::arg("cpu_slot"), "(offset in the packed bytes, address, bytes) of each.")
      .def("all_cpu_slots", &ExpertStore::all_cpu_slots,
           "What CPU slots lie in, for each memory node; empty: nothing is loaded.")
      .def("own_memory", &own_memory_of, "(address, bytes) of what CPU slots lie in; (0, 0): none, or in a file.")
      .def_prop_ro("in_place", &ExpertStore::in_place, "Whether they are used where they were given.")
      .def_prop_ro("in_file", &ExpertStore::in_file, "Whether they lie in a mapped file.")
      .def_prop_ro("loaded", &ExpertStore::loaded, "How many experts are here.")
      .def_prop_ro("tier", [](const ExpertStore& self) { return name_of(self.workspace().table().tier); })
      .def_prop_ro("bytes_per_expert", &ExpertStore::bytes_per_expert);
}

}  // namespace tandem
