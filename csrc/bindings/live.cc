#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "experts/live/exchange_turn.h"
#include "experts/live/use_decision.h"

namespace nb = nanobind;

namespace tandem {
namespace {

using ExchangeTuple = std::tuple<int, int, int, int>;

void add_layer(MovingLayers& self, std::shared_ptr<ExpertStore> cpu, nb::handle slot_of, uint64_t slots,
               int64_t slot_count) {
  const TensorView entries = view_of(slot_of, "slot_of", {Element::i32}, {cpu->shape().experts}, true);
  self.add({std::move(cpu), static_cast<int32_t*>(entries.data), slots, slot_count});
}

std::vector<Exchange> exchanges_of(const std::vector<ExchangeTuple>& tuples) {
  std::vector<Exchange> made;
  for (const auto& [layer, slot, leaving, coming] : tuples) made.push_back({layer, slot, leaving, coming});
  return made;
}

void* stream_of(uintptr_t handle) { return reinterpret_cast<void*>(handle); }

void make_turn(ExchangeTurn* self, std::shared_ptr<MovingLayers> layers, std::tuple<uintptr_t, uintptr_t> functions,
               std::tuple<uintptr_t, uintptr_t, uintptr_t> streams, std::tuple<uint64_t, uint64_t, int64_t> tables,
               const std::vector<ExchangeTuple>& exchanges, const std::vector<uint64_t>& buffers) {
  const auto& [copy, query] = functions;
  const auto& [up, down, computing] = streams;
  const auto& [image, table, table_bytes] = tables;
  const auto copy_async = reinterpret_cast<CopyAsync>(copy);
  auto moves = std::make_unique<ExpertMoves>(std::move(layers), copy_async, exchanges_of(exchanges), buffers);
  new (self) ExchangeTurn(std::move(moves), {copy_async, reinterpret_cast<StreamQuery>(query), stream_of(up),
                                             stream_of(down), stream_of(computing), image, table, table_bytes});
}

nb::list troubles_of(ExchangeTurn& self) {
  static constexpr const char* kFates[] = {"dropped", "stranded", "done"};
  nb::list made;
  for (const ExpertMoves::Trouble& t : self.moves().troubles())
    made.append(nb::make_tuple(t.index, kFates[int(t.fate)], t.keeps_buffer, t.ends_layer, t.why));
  return made;
}

int copy_async(uintptr_t copy, uint64_t source, uint64_t target, uint64_t bytes, uintptr_t stream) {
  return reinterpret_cast<CopyAsync>(copy)(target, source, size_t(bytes), stream_of(stream));
}

// With the array that its pieces read.
struct BoundDecision final : UseDecision {
  using UseDecision::UseDecision;
  TensorView now{};
};

void make_decision(BoundDecision* self, nb::handle counts, nb::handle seen, nb::handle better, nb::handle may,
                   nb::handle slot_of) {
  const TensorView to = view_of(counts, "counts", {Element::f32}, {kAnySize, kAnySize}, true);
  const int64_t layers = to.shape[0], experts = to.shape[1];
  const TensorView before = view_of(seen, "seen", {Element::i32, Element::i64}, {layers, experts}, true);
  const TensorView signs = view_of(better, "better", {Element::byte}, {layers, experts}, true);
  const TensorView allowed = view_of(may, "may", {Element::byte}, {layers, experts}, true);
  const TensorView slots = view_of(slot_of, "slot_of", {Element::i64}, {layers, experts}, true);
  UseDecision::Arrays arrays{static_cast<float*>(to.data),
                             {},
                             static_cast<int8_t*>(signs.data),
                             static_cast<int8_t*>(allowed.data),
                             static_cast<int64_t*>(slots.data),
                             layers,
                             experts};
  if (before.element == Element::i32)
    arrays.seen = static_cast<int32_t*>(before.data);
  else
    arrays.seen = static_cast<int64_t*>(before.data);
  new (self) BoundDecision(arrays);
}

void begin_decision(BoundDecision& self, nb::handle now, float keep, float least_gain, float least_lead,
                    float least_hot, float luck) {
  const auto& [layers, experts] = self.shape();
  const Element kind = self.is_long() ? Element::i64 : Element::i32;
  self.now = view_of(now, "now", {kind}, {layers, experts});
  UseDecision::Counted counted = static_cast<const int32_t*>(self.now.data);
  if (self.is_long()) counted = static_cast<const int64_t*>(self.now.data);
  self.begin(counted, keep, {least_gain, least_lead, least_hot, luck});
}

std::vector<ExchangeTuple> tuples_of(const std::vector<Exchange>& exchanges) {
  std::vector<ExchangeTuple> made;
  for (const Exchange& each : exchanges) made.emplace_back(each.layer, each.slot, each.leaving, each.coming);
  return made;
}

// now, seen (or None): int32 or int64 of counts' shape.
double add_uses_to(nb::handle counts, nb::handle now, nb::handle seen, nb::handle better, float keep) {
  const TensorView to = view_of(counts, "counts", {Element::f32}, {kAnySize, kAnySize}, true);
  const int64_t layers = to.shape[0], experts = to.shape[1];
  const TensorView uses = view_of(now, "now", {Element::i32, Element::i64}, {layers, experts});
  const TensorView signs = view_of(better, "better", {Element::byte}, {layers, experts});
  TensorView before;
  if (!seen.is_none()) before = view_of(seen, "seen", {uses.element}, {layers, experts}, true);
  const auto add = [&](auto* type) {
    using Count = std::remove_pointer_t<decltype(type)>;
    return add_uses(static_cast<float*>(to.data), static_cast<const Count*>(uses.data),
                    static_cast<Count*>(before.data), static_cast<const int8_t*>(signs.data), keep, layers * experts);
  };
  const bool is_short = uses.element == Element::i32;
  return double((is_short ? add(static_cast<int32_t*>(nullptr)) : add(static_cast<int64_t*>(nullptr))).gained);
}

std::vector<ExchangeTuple> pick(nb::handle scores, nb::handle away, nb::handle goal, nb::handle idle,
                                nb::handle slot_of, std::tuple<float, float, float> rules, size_t room) {
  const TensorView from = view_of(scores, "scores", {Element::f32}, {kAnySize, kAnySize});
  const int64_t layers = from.shape[0], experts = from.shape[1];
  const TensorView here = view_of(away, "away", {Element::byte}, {layers, experts});
  TensorView there;
  if (!goal.is_none()) there = view_of(goal, "goal", {Element::byte}, {layers, experts});
  const TensorView free = view_of(idle, "idle", {Element::byte}, {layers, experts}, true);
  const TensorView slots = view_of(slot_of, "slot_of", {Element::i64}, {layers, experts});
  const auto& [least_gain, least_lead, least_hot] = rules;
  return tuples_of(pick_towards({static_cast<const float*>(from.data), static_cast<const int8_t*>(here.data),
                                 static_cast<const int8_t*>(there.data), static_cast<int8_t*>(free.data),
                                 static_cast<const int64_t*>(slots.data), layers, experts},
                                {least_gain, least_lead, least_hot}, room));
}

void note(const std::vector<ExchangeTuple>& made, nb::handle slot_of, nb::handle better, nb::handle may) {
  const TensorView slots = view_of(slot_of, "slot_of", {Element::i64}, {kAnySize, kAnySize}, true);
  const int64_t layers = slots.shape[0], experts = slots.shape[1];
  const TensorView signs = view_of(better, "better", {Element::byte}, {layers, experts}, true);
  const TensorView allowed = view_of(may, "may", {Element::byte}, {layers, experts}, true);
  const std::vector<Exchange> exchanges = exchanges_of(made);
  for (const Exchange& exchange : exchanges) {
    if (exchange.layer < 0 || exchange.layer >= layers)
      throw KernelError("there is no layer " + std::to_string(exchange.layer));
    for (const int expert : {exchange.leaving, exchange.coming})
      if (expert < 0 || expert >= experts) throw KernelError("there is no expert " + std::to_string(expert));
  }
  note_exchanges(exchanges, static_cast<int64_t*>(slots.data), static_cast<int8_t*>(signs.data),
                 static_cast<int8_t*>(allowed.data), experts);
}

}  // namespace

void bind_live(nb::module_& m) {
  nb::class_<MovingLayers>(m, "MovingLayers",
                           "Both sides of layers whose experts move, see csrc/experts/live/expert_moves.h.")
      .def(nb::init<>())
      .def("add", &add_layer, nb::arg("cpu"), nb::arg("slot_of"), nb::arg("slots"), nb::arg("slot_count"),
           nb::keep_alive<1, 3>(), "slot_of int32 [experts] is changed in place.")
      .def("add_none", [](MovingLayers& self) { self.add({}); }, "A layer that lives on one side only.");
  nb::class_<ExchangeTurn, Meanwhile>(
      m, "ExchangeTurn", "Exchanges that are copied and end together, see csrc/experts/live/exchange_turn.h.")
      .def("__init__", &make_turn, nb::arg("layers"), nb::arg("functions"), nb::arg("streams"), nb::arg("tables"),
           nb::arg("exchanges"), nb::arg("stages"),
           "functions: cuMemcpyAsync, cuStreamQuery. streams: up, down, computing. tables: image, themselves, bytes.")
      .def("run", &ExchangeTurn::run, nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>(),
           "What can be done in this time, while no step is under way; returns whether all has ended.")
      .def("troubles", &troubles_of, "(index, what became of it, keeps its stage, ends its layer, why) of each.")
      .def_prop_ro("bytes_given", &ExchangeTurn::bytes_given);
  nb::class_<BoundDecision, Meanwhile>(m, "UseDecision",
                                       "Decisions of a virtual placement, a layer at a time, see use_decision.h.")
      .def("__init__", &make_decision, nb::arg("counts"), nb::arg("seen"), nb::arg("better"), nb::arg("may"),
           nb::arg("slot_of"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), "All [layers, experts], changed in place.")
      .def("begin", &begin_decision, nb::arg("now"), nb::arg("keep"), nb::arg("least_gain"), nb::arg("least_lead"),
           nb::arg("least_hot"), nb::arg("luck"),
           "Another decision. now: of the type of `seen`, unchanged until `sums`.")
      .def(
          "sums",
          [](BoundDecision& self) {
            const UseSums& sums = self.sums();
            return std::tuple(sums.used, sums.gained, sums.displaced);
          },
          "Uses, uses * better, and how many experts' `better` is not 0; does what is left.")
      .def(
          "exchange", [](BoundDecision& self, size_t room) { return tuples_of(self.exchange(room)); }, nb::arg("room"),
          "(layer, slot, leaving, coming) of each that was made, most worthwhile first; does what is left.");
  m.def("add_uses", &add_uses_to, nb::arg("counts"), nb::arg("now"), nb::arg("seen").none(), nb::arg("better"),
        nb::arg("keep"),
        "counts = counts * keep + now - seen, seen = now; returns the sum of what was added * better.");
  m.def(
      "pick_towards", &pick, nb::arg("scores"), nb::arg("away"), nb::arg("goal").none(), nb::arg("idle"),
      nb::arg("slot_of"), nb::arg("rules"), nb::arg("room"),
      "(layer, slot, leaving, coming) of each, see csrc/experts/live/use_counts.h. rules: least gain, lead and score.");
  m.def("note_exchanges", &note, nb::arg("made"), nb::arg("slot_of"), nb::arg("better"), nb::arg("may"));
  m.def("copy_async", &copy_async, nb::arg("copy"), nb::arg("source"), nb::arg("target"), nb::arg("bytes"),
        nb::arg("stream"), "Calls CUDA's cuMemcpyAsync at the address `copy`; 0, or its error.");
}

}  // namespace tandem
