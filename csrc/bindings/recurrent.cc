// Layers whose memory of a sequence has a constant size: arrays in, checked, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "ops/recurrent/channels.h"
#include "ops/recurrent/fold.h"
#include "ops/recurrent/spaces.h"
#include "runtime/tiers.h"

namespace nb = nanobind;

namespace tandem {
namespace {

float* floats(const TensorView& view) { return static_cast<float*>(view.data); }

struct RecurrentOps {
  RecurrentOps(std::shared_ptr<WorkerPool> workers, const std::string& tier)
      : pool(std::move(workers)), dense{*pool, dense_kernels(tier)} {}

  void fold(const BatchView& batch, bool corrects, nb::handle asked, nb::handle written, nb::handle values,
            nb::handle decay, nb::handle beta, nb::handle memory, nb::handle out) const {
    const int64_t rows = batch.rows();
    const TensorView q = view_of(asked, "asked", {Element::f32}, {rows, kAnySize, kAnySize});
    const TensorView k = view_of(written, "written", {Element::f32}, {rows, q.shape[1], q.shape[2]});
    const TensorView v = view_of(values, "values", {Element::f32}, {rows, kAnySize, kAnySize});
    const TensorView d = view_of(decay, "decay", {Element::f32}, {rows, v.shape[1], kAnySize});
    const FoldShape shape{v.shape[1], q.shape[1], q.shape[2], v.shape[2], d.shape[2], corrects};
    expect(shape.groups > 0 && shape.heads % shape.groups == 0, "fold: the heads do not share what is written evenly");
    expect(shape.decays == 1 || shape.decays == shape.k_dim, "fold: a head decays as one, or each of its keys apart");
    expect(corrects != beta.is_none(), "fold: beta is for memories that are corrected");
    const TensorView b = corrects ? view_of(beta, "beta", {Element::f32}, {rows, shape.heads}) : TensorView{};
    const TensorView state =
        slots_of(memory, "memory", {Element::f32}, {kAnySize, shape.heads, shape.k_dim, shape.v_dim});
    const TensorView y = view_of(out, "out", {Element::f32}, {rows, shape.heads, shape.v_dim}, true);
    const FoldCall call{static_cast<float*>(q.data),    static_cast<float*>(k.data), static_cast<float*>(v.data),
                        static_cast<float*>(d.data),    static_cast<float*>(b.data), static_cast<float*>(y.data),
                        static_cast<char*>(state.data), state.row_stride * 4,        state.shape[0]};
    if (Recording* recording = Recording::current()) recording->keep(nb::find(&batch));
    perform(*this, [this, &batch, shape, call] { tandem::fold(dense, batch, shape, call); });
  }

  void convolve(const BatchView& batch, nb::handle rows, nb::handle weights, bool bias, bool gated, nb::handle ring,
                nb::handle out) const {
    const TensorView in = slots_of(rows, "rows", {Element::bf16, Element::f32}, {batch.rows(), kAnySize});
    expect(!gated || in.shape[1] % 3 == 0, "convolve: rows are not two gates and values");
    const int64_t channels = gated ? in.shape[1] / 3 : in.shape[1];
    const TensorView w = view_of(weights, "weights", {Element::f32}, {kAnySize, channels});
    const TensorView kept = slots_of(ring, "ring", {in.element}, {kAnySize, kAnySize, channels});
    const TensorView y = view_of(out, "out", {gated ? in.element : Element::f32}, {batch.rows(), channels}, true);
    expect(w.shape[0] > bias, "convolve: there are no taps");
    const ConvolutionCall call{in.data,
                               static_cast<float*>(w.data),
                               kept.data,
                               y.data,
                               channels,
                               w.shape[0] - bias,
                               kept.shape[1],
                               kept.shape[0],
                               kept.row_stride * (in.type() == DType::bf16 ? 2 : 4),
                               in.row_stride,
                               bias,
                               gated,
                               in.type()};
    if (Recording* recording = Recording::current()) recording->keep(nb::find(&batch));
    perform(*this, [this, &batch, call] { tandem::convolve(dense, batch, call); });
  }

  void channel_delta(const BatchView& batch, nb::handle mixed, nb::handle forget, nb::handle beta, nb::handle behind,
                     nb::handle decay, nb::handle bias, nb::handle norm, nb::handle kept_mixed, nb::handle kept_forget,
                     nb::handle kept_beta, nb::handle memory, nb::handle out, float eps, float floor) const {
    const int64_t rows = batch.rows();
    expect(floor <= 0.0f, "channel_delta: decays' floor must be 0 or below");
    const TensorView rate = view_of(decay, "decay", {Element::f32}, {kAnySize});
    const TensorView n = view_of(norm, "norm", {Element::f32}, {kAnySize});
    const int64_t heads = rate.shape[0], dim = n.shape[0], inner = heads * dim;
    const TensorView in = view_of(mixed, "mixed", {Element::f32}, {rows, 3 * inner});
    const TensorView f = activations(forget, "forget", {rows, inner});
    const TensorView g = like(f, behind, "behind", {rows, inner});
    const TensorView b = slots_of(beta, "beta", {f.element}, {rows, heads});
    const TensorView added = view_of(bias, "bias", {Element::f32}, {inner});
    const TensorView state = slots_of(memory, "memory", {Element::f32}, {kAnySize, heads, dim, dim});
    const TensorView m = slots_of(kept_mixed, "kept_mixed", {Element::f32}, {state.shape[0], kAnySize, 3 * inner});
    const TensorView kf = slots_of(kept_forget, "kept_forget", {f.element}, {state.shape[0], m.shape[1], inner});
    const TensorView kb = slots_of(kept_beta, "kept_beta", {f.element}, {state.shape[0], m.shape[1], heads});
    const int64_t size = f.type() == DType::bf16 ? 2 : 4;
    const ChannelInputs inputs{static_cast<char*>(m.data),
                               static_cast<char*>(kf.data),
                               static_cast<char*>(kb.data),
                               m.row_stride * 4,
                               kf.row_stride * size,
                               kb.row_stride * size,
                               m.shape[1]};
    const TensorView y = like(f, out, "out", {rows, inner}, true);
    char* slots = static_cast<char*>(state.data);
    const ChannelCall call{
        floats(in),           f.data,         b.data, g.data, floats(rate), floats(added), floats(n), y.data, slots,
        state.row_stride * 4, state.shape[0], inputs, heads,  dim,          b.row_stride,  eps,       floor,  f.type()};
    if (Recording* recording = Recording::current()) recording->keep(nb::find(&batch));
    perform(*this, [this, &batch, call] { tandem::channel_delta(dense, batch, call); });
  }

  void state_space(const BatchView& batch, int64_t groups, nb::handle mixed, nb::handle gate, nb::handle steps,
                   nb::handle decay, nb::handle bias, nb::handle through, nb::handle norm, nb::handle memory,
                   nb::handle gated, nb::handle out, float eps) const {
    const int64_t rows = batch.rows();
    const TensorView rate = view_of(decay, "decay", {Element::f32}, {kAnySize});
    const int64_t heads = rate.shape[0];
    const TensorView state = slots_of(memory, "memory", {Element::f32}, {kAnySize, heads, kAnySize, kAnySize});
    const SpaceShape shape{heads, groups, state.shape[2], state.shape[3]};
    expect(groups > 0 && heads % groups == 0, "state_space: the heads do not share what is written evenly");
    const TensorView in = view_of(mixed, "mixed", {Element::f32}, {rows, shape.channels()});
    const TensorView g = slots_of(gate, "gate", {Element::bf16, Element::f32}, {rows, shape.inner()});
    const TensorView s = slots_of(steps, "steps", {g.element}, {rows, heads});
    const TensorView b = view_of(bias, "bias", {Element::f32}, {heads});
    const TensorView t = view_of(through, "through", {Element::f32}, {heads});
    const TensorView n = view_of(norm, "norm", {Element::f32}, {shape.inner()});
    const TensorView between = view_of(gated, "gated", {Element::f32}, {rows, shape.inner()}, true);
    const TensorView y = like(g, out, "out", {rows, shape.inner()}, true);
    char* slots = static_cast<char*>(state.data);
    const SpaceCall call{
        floats(in), g.data,          s.data, g.row_stride, s.row_stride,         floats(rate),   floats(b), floats(t),
        floats(n),  floats(between), y.data, slots,        state.row_stride * 4, state.shape[0], eps,       g.type()};
    if (Recording* recording = Recording::current()) recording->keep(nb::find(&batch));
    perform(*this, [this, &batch, shape, call] { tandem::state_space(dense, batch, shape, call); });
  }

  std::shared_ptr<WorkerPool> pool;
  DenseOps dense;
};

}  // namespace

void bind_recurrent(nb::module_& m) {
  nb::class_<RecurrentOps>(m, "RecurrentOps", "Recurrences, and what stands around them, on a pool.")
      .def(nb::init<std::shared_ptr<WorkerPool>, const std::string&>(), nb::arg("pool"), nb::arg("tier"))
      .def("fold", &RecurrentOps::fold, nb::arg("batch"), nb::arg("corrects"), nb::arg("asked"), nb::arg("written"),
           nb::arg("values"), nb::arg("decay"), nb::arg("beta").none(), nb::arg("memory"), nb::arg("out"))
      .def("channel_delta", &RecurrentOps::channel_delta, nb::arg("batch"), nb::arg("mixed"), nb::arg("forget"),
           nb::arg("beta"), nb::arg("behind"), nb::arg("decay"), nb::arg("bias"), nb::arg("norm"),
           nb::arg("kept_mixed"), nb::arg("kept_forget"), nb::arg("kept_beta"), nb::arg("memory"), nb::arg("out"),
           nb::arg("eps"), nb::arg("floor"),
           "kept: what rows of draft tokens were given, in each sequence's slot [places, ...].")
      .def("convolve", &RecurrentOps::convolve, nb::arg("batch"), nb::arg("rows"), nb::arg("weights"), nb::arg("bias"),
           nb::arg("gated"), nb::arg("ring"), nb::arg("out"))
      .def("state_space", &RecurrentOps::state_space, nb::arg("batch"), nb::arg("groups"), nb::arg("mixed"),
           nb::arg("gate"), nb::arg("steps"), nb::arg("decay"), nb::arg("bias"), nb::arg("through"), nb::arg("norm"),
           nb::arg("memory"), nb::arg("gated"), nb::arg("out"), nb::arg("eps"),
           "gated: float32, what is left before the norm.");
}

}  // namespace tandem
