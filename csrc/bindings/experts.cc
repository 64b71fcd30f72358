#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/codes.h"
#include "bindings/names.h"
#include "bindings/recording.h"
#include "bindings/tensor.h"
#include "experts/expert_layer.h"

namespace nb = nanobind;

namespace tandem {
namespace {

void make_layer(ExpertLayer* self, std::shared_ptr<Workspace> workspace, int experts, int hidden, int width,
                const std::string& format, int group, const std::string& scale_type, const std::string& activation,
                float alpha, float limit) {
  const WeightFormat weights{format_named(format), group, scale_type_named(scale_type)};
  const Activation act{activation_named(activation), alpha, limit};
  new (self) ExpertLayer(std::move(workspace), {experts, hidden, width, weights, act});
}

MatrixSource source_of(const TensorView& w) { return {w.data, w.type(), w.shape[0], w.shape[1]}; }

void load(ExpertLayer& self, int expert, nb::handle gate, nb::handle up, nb::handle down, nb::handle gate_bias,
          nb::handle up_bias, nb::handle down_bias) {
  const int64_t hidden = self.shape().hidden, width = self.shape().width;
  TensorView biases[3];
  const TensorView g = view_of(gate, "gate", {Element::f32, Element::bf16}, {width, hidden});
  const TensorView u = view_of(up, "up", {Element::f32, Element::bf16}, {width, hidden});
  const TensorView d = view_of(down, "down", {Element::f32, Element::bf16}, {hidden, width});
  const ExpertSource source{source_of(g),
                            source_of(u),
                            source_of(d),
                            optional_floats(gate_bias, "gate_bias", width, &biases[0]),
                            optional_floats(up_bias, "up_bias", width, &biases[1]),
                            optional_floats(down_bias, "down_bias", hidden, &biases[2])};
  const nb::gil_scoped_release unlocked;
  self.load(expert, source);
}

void load_codes(ExpertLayer& self, int expert, nb::handle gate, nb::handle gate_scales, nb::handle up,
                nb::handle up_scales, nb::handle down, nb::handle down_scales, int64_t block_rows, nb::handle gate_bias,
                nb::handle up_bias, nb::handle down_bias) {
  const int64_t hidden = self.shape().hidden, width = self.shape().width;
  const WeightFormat& f = self.shape().format;
  CodeViews views[3];
  TensorView biases[3];
  const ExpertSource source{
      codes_of(gate, gate_scales, {"gate", "gate_scales"}, width, hidden, f, block_rows, &views[0]),
      codes_of(up, up_scales, {"up", "up_scales"}, width, hidden, f, block_rows, &views[1]),
      codes_of(down, down_scales, {"down", "down_scales"}, hidden, width, f, block_rows, &views[2]),
      optional_floats(gate_bias, "gate_bias", width, &biases[0]),
      optional_floats(up_bias, "up_bias", width, &biases[1]),
      optional_floats(down_bias, "down_bias", hidden, &biases[2])};
  const nb::gil_scoped_release unlocked;
  self.load(expert, source);
}

void forward(ExpertLayer& self, nb::handle x, nb::handle ids, nb::handle weights, nb::handle out, bool add) {
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

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<ExpertLayer>(m, "ExpertLayer", "The routed experts of one layer: gated MLPs of equal shape.")
      .def("__init__", &make_layer, nb::arg("workspace"), nb::arg("experts"), nb::arg("hidden"), nb::arg("width"),
           nb::arg("format"), nb::arg("group"), nb::arg("scale_type"), nb::arg("activation"), nb::arg("alpha"),
           nb::arg("limit"))
      .def("load", &load, nb::arg("expert"), nb::arg("gate"), nb::arg("up"), nb::arg("down"),
           nb::arg("gate_bias").none() = nb::none(), nb::arg("up_bias").none() = nb::none(),
           nb::arg("down_bias").none() = nb::none())
      .def("load_codes", &load_codes, nb::arg("expert"), nb::arg("gate"), nb::arg("gate_scales"), nb::arg("up"),
           nb::arg("up_scales"), nb::arg("down"), nb::arg("down_scales"), nb::arg("block_rows"),
           nb::arg("gate_bias").none() = nb::none(), nb::arg("up_bias").none() = nb::none(),
           nb::arg("down_bias").none() = nb::none())
      .def("forward", &forward, nb::arg("x"), nb::arg("ids"), nb::arg("weights"), nb::arg("out"), nb::arg("add"))
      .def("bytes", &ExpertLayer::bytes, nb::arg("first"), nb::arg("count"), "Of the experts [first, first + count).")
      .def("read_next", &ExpertLayer::read_next, nb::arg("upcoming"),
           "Weights that are read after this layer: idle workers fetch them.")
      .def_prop_ro("tier", [](const ExpertLayer& self) { return name_of(self.workspace().table().tier); })
      .def_prop_ro("bytes_per_expert", &ExpertLayer::bytes_per_expert);
}

}  // namespace tandem
