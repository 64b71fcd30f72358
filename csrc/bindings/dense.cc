// The dense operations: arrays in, checked, and nothing else. The batch's indices are checked once, in BatchView.
#include "ops/dense.h"

#include "ops/recurrent/delta_rule.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor.h"
#include "runtime/tiers.h"

namespace nb = nanobind;

namespace tandem {
namespace {

// A norm's weights: of the type of `x`, or float32.
TensorView weights_of(const TensorView& x, nb::handle array, const char* name, std::initializer_list<int64_t> shape) {
  return view_of(array, name, {x.element, Element::f32}, shape);
}

template <class T>
std::vector<T> copied(nb::handle array, const char* name, Element element, std::initializer_list<int64_t> shape) {
  const TensorView view = view_of(array, name, {element}, shape);
  int64_t count = 1;
  for (int i = 0; i < view.dims; ++i) count *= view.shape[i];
  const T* first = static_cast<const T*>(view.data);
  return {first, first + count};
}

// Runs every step, over a table of up to 2^18 pages: no Python object per entry.
BatchView make_batch(nb::handle positions, nb::handle cache_slots, nb::handle query_starts, nb::handle seq_lens,
                     nb::handle block_tables, int64_t page_size, int64_t num_pages, nb::handle slots,
                     nb::handle state_lens, nb::handle num_verified) {
  BatchView made(copied<int64_t>(positions, "positions", Element::i64, {kAnySize}),
                 copied<int64_t>(cache_slots, "cache_slots", Element::i64, {kAnySize}),
                 copied<int32_t>(query_starts, "query_starts", Element::i32, {kAnySize}),
                 copied<int32_t>(seq_lens, "seq_lens", Element::i32, {kAnySize}),
                 copied<int32_t>(block_tables, "block_tables", Element::i32, {kAnySize, kAnySize}),
                 slots.is_none() ? std::vector<int32_t>{} : copied<int32_t>(slots, "slots", Element::i32, {kAnySize}),
                 page_size, num_pages);
  if (!state_lens.is_none())
    made.set_drafts(copied<int32_t>(state_lens, "state_lens", Element::i32, {kAnySize}),
                    copied<int32_t>(num_verified, "num_verified", Element::i32, {kAnySize}));
  return made;
}

// Recorded operations refer to `self` and to arrays of its number of rows, in a cache of its size.
void become(BatchView& self, const BatchView& other) {
  expect(other.rows() == self.rows() && other.num_pages == self.num_pages && other.page_size == self.page_size,
         "batch: a recorded step was made for another number of rows, or for another cache");
  self = other;
}

struct Ops {
  Ops(std::shared_ptr<WorkerPool> workers, const std::string& tier)
      : pool(std::move(workers)), dense{*pool, dense_kernels(tier)} {}

  void rms_norm(nb::handle x, nb::handle residual, nb::handle weight, nb::handle out, float eps) const {
    const TensorView in = activations(x, "x", {kAnySize, kAnySize});
    const int64_t rows = in.shape[0], n = in.shape[1];
    const TensorView sum = residual.is_none() ? TensorView{} : like(in, residual, "residual", {rows, n}, true);
    const TensorView w = weights_of(in, weight, "weight", {n}), y = like(in, out, "out", {rows, n}, true);
    perform(*this, [=, this, in = in.data, sum = sum.data, w = w.data, y = y.data, type = in.type(), wide = w.type()] {
      dense.rms_norm(in, sum, w, y, rows, n, eps, type, wide);
    });
  }

  void rope_store(const BatchView& batch, const DenseOps::Heads& heads, nb::handle qkv, nb::handle cos, nb::handle sin,
                  nb::handle q_norm, nb::handle k_norm, nb::handle k_pages, nb::handle v_pages, nb::handle q,
                  float eps) const {
    const int64_t rows = batch.rows(), d = heads.head_dim;
    const int64_t values = v_pages.is_none() ? 0 : heads.kv_heads * heads.value_dim;  // 0: keys are values, too
    const TensorView in = activations(qkv, "qkv", {rows, (heads.heads + heads.kv_heads) * d + values});
    const TensorView c = view_of(cos, "rope.cos", {Element::f32}, {kAnySize, kAnySize});
    const TensorView s = view_of(sin, "rope.sin", {Element::f32}, {c.shape[0], c.shape[1]});
    expect(2 * c.shape[1] <= d, "rope_store: the rotary tables turn more elements than a head has");
    const TensorView k = pages(in, k_pages, "k_pages", batch, heads.kv_heads, d);
    const TensorView v = value_pages(in, v_pages, batch, heads);
    const TensorView y = like(in, q, "q", {rows, heads.heads, d}, true);
    const TensorView qn = heads.q_norm_size ? weights_of(in, q_norm, "q_norm", {heads.q_norm_size}) : TensorView{};
    const TensorView kn = heads.k_norm_size ? weights_of(in, k_norm, "k_norm", {heads.k_norm_size}) : TensorView{};
    expect(!qn.data || !kn.data || qn.element == kn.element, "q_norm and k_norm have different types");
    const DenseOps::RopeStore call{in.data,
                                   static_cast<float*>(c.data),
                                   static_cast<float*>(s.data),
                                   c.shape[0],
                                   c.shape[1],
                                   qn.data,
                                   kn.data,
                                   k.data,
                                   v.data,
                                   y.data,
                                   eps,
                                   in.type(),
                                   qn.data   ? qn.type()
                                   : kn.data ? kn.type()
                                             : in.type()};
    if (Recording* recording = Recording::current()) recording->keep(nb::find(&batch));
    perform(*this, [this, &batch, heads, call] { dense.rope_store(batch, heads, call); });
  }

  void attention(const BatchView& batch, const DenseOps::Heads& heads, nb::handle q, nb::handle k_pages,
                 nb::handle v_pages, nb::handle out, float scale, int64_t window, nb::handle sinks) const {
    const TensorView in = activations(q, "q", {batch.rows(), heads.heads, heads.head_dim});
    const TensorView k = pages(in, k_pages, "k_pages", batch, heads.kv_heads, heads.head_dim);
    const TensorView v = value_pages(in, v_pages, batch, heads);
    const TensorView y = like(in, out, "out", {batch.rows(), heads.heads * heads.value_dim}, true);
    TensorView s;
    const float* floats = optional_floats(sinks, "sinks", heads.heads, &s);
    const DenseOps::Attention call{in.data, k.data, v.data, y.data, scale, window, in.type(), floats};
    if (Recording* recording = Recording::current()) recording->keep(nb::find(&batch));
    perform(*this, [this, &batch, heads, call] { dense.attention(batch, heads, call); });
  }

  void route(const DenseOps::Route& rule, nb::handle logits, nb::handle bias, nb::handle ids, nb::handle weights,
             nb::handle tokens, nb::handle seen, nb::handle chosen) const {
    DenseOps::Route args = rule;
    TensorView b;
    const TensorView in = view_of(logits, "logits", {Element::f32}, {kAnySize, rule.experts});
    const int64_t slots = rule.top_k + rule.shared;
    args.logits = static_cast<float*>(in.data);
    args.bias = optional_floats(bias, "bias", rule.experts, &b);
    const TensorView i = view_of(ids, "ids", {Element::i32}, {in.shape[0], slots}, true);
    const TensorView w = view_of(weights, "weights", {Element::f32}, {in.shape[0], slots}, true);
    args.ids = static_cast<int32_t*>(i.data);
    args.weights = static_cast<float*>(w.data);
    const TensorView t = optional(tokens, "tokens", Element::i64, {rule.experts});
    const TensorView s = optional(seen, "seen", Element::i64, {rule.experts});
    const TensorView c = optional(chosen, "chosen", Element::i32, {kAnySize, rule.top_k});
    expect(!c.data || c.shape[0] >= in.shape[0], "chosen has fewer rows than the logits");
    args.tokens = static_cast<int64_t*>(t.data);
    args.seen = static_cast<int64_t*>(s.data);
    args.chosen = static_cast<int32_t*>(c.data);
    perform(*this, [this, rows = in.shape[0], args] { dense.route(rows, args); });
  }

  void delta_rule(const BatchView& batch, const DeltaShape& shape, nb::handle projected, nb::handle gates,
                  nb::handle conv, nb::handle decay, nb::handle dt_bias, nb::handle norm, nb::handle inputs,
                  nb::handle kept_gates, nb::handle memory, nb::handle out, float eps) const {
    const int64_t rows = batch.rows();
    const TensorView in = activations(projected, "projected", {rows, shape.projected});
    const int64_t size = in.type() == DType::bf16 ? 2 : 4;
    const TensorView g = like(in, gates, "gates", {rows, shape.gates});
    const TensorView c = view_of(conv, "conv", {Element::f32}, {shape.conv_width, shape.channels()});
    const TensorView a = view_of(decay, "decay", {Element::f32}, {shape.v_heads});
    const TensorView d = view_of(dt_bias, "dt_bias", {Element::f32}, {shape.v_heads});
    const TensorView n = like(in, norm, "norm", {shape.v_dim});
    const TensorView kept_rows = slots_of(inputs, "inputs", {in.element}, {kAnySize, kAnySize, shape.channels()});
    const int64_t places = kept_rows.shape[1];
    const TensorView kept_g = slots_of(kept_gates, "kept_gates", {in.element}, {kAnySize, places, shape.gates});
    const TensorView state =
        slots_of(memory, "memory", {Element::f32}, {kAnySize, shape.v_heads, shape.k_dim, shape.v_dim});
    const TensorView y = like(in, out, "out", {rows, shape.v_heads * shape.v_dim}, true);
    expect(kept_rows.shape[0] == state.shape[0] && kept_g.shape[0] == state.shape[0],
           "inputs, gates and memory have different numbers of slots");
    const DeltaState where{static_cast<char*>(kept_rows.data),
                           static_cast<char*>(kept_g.data),
                           static_cast<char*>(state.data),
                           kept_rows.row_stride * size,
                           kept_g.row_stride * size,
                           state.row_stride * 4,
                           state.shape[0],
                           places};
    const DeltaCall call{in.data,
                         g.data,
                         static_cast<float*>(c.data),
                         static_cast<float*>(a.data),
                         static_cast<float*>(d.data),
                         n.data,
                         y.data,
                         where,
                         eps,
                         in.type()};
    if (Recording* recording = Recording::current()) recording->keep(nb::find(&batch));
    perform(*this, [this, &batch, shape, call] { tandem::delta_rule(dense, batch, shape, call); });
  }

  void fill_memory(nb::handle data, float value) const {
    const TensorView out = view_of(data, "data", {Element::f32}, {kAnySize}, true);
    const nb::gil_scoped_release unlocked;
    dense.fill_memory(static_cast<float*>(out.data), 4 * out.shape[0], value);
  }

  float read_ranges(const std::vector<std::vector<ByteRange>>& of_node) const {
    const nb::gil_scoped_release unlocked;
    return dense.read_ranges(of_node);
  }

  float read_memory(nb::handle data) const {
    const TensorView in = view_of(data, "data", {Element::f32}, {kAnySize});
    const nb::gil_scoped_release unlocked;
    return dense.read_memory(in.data, 4 * in.shape[0]);
  }

  std::shared_ptr<WorkerPool> pool;
  DenseOps dense;

 private:
  static TensorView pages(const TensorView& x, nb::handle array, const char* name, const BatchView& batch,
                          int64_t heads, int64_t dim) {
    return like(x, array, name, {batch.num_pages, batch.page_size, heads, dim}, true);
  }
  static TensorView value_pages(const TensorView& x, nb::handle array, const BatchView& batch,
                                const DenseOps::Heads& heads) {
    if (!array.is_none()) return pages(x, array, "v_pages", batch, heads.kv_heads, heads.value_dim);
    expect(heads.value_dim == heads.head_dim, "keys that are values, too, are as wide as these");
    return {};
  }
  static TensorView optional(nb::handle array, const char* name, Element element,
                             std::initializer_list<int64_t> shape) {
    return array.is_none() ? TensorView{} : view_of(array, name, {element}, shape, true);
  }
};

DenseOps::Heads make_heads(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t q_norm_size, int64_t k_norm_size,
                           int64_t value_dim) {
  expect(0 <= value_dim && value_dim <= head_dim, "the values of a head are wider than its keys");
  expect(head_dim > 0 && kv_heads > 0 && heads % kv_heads == 0, "the heads do not share the kv heads evenly");
  const auto fits = [&](int64_t size, int64_t count) {
    return size == 0 || size == head_dim || size == count * head_dim;
  };
  expect(fits(q_norm_size, heads) && fits(k_norm_size, kv_heads),
         "a head norm must have the elements of one head or of all heads");
  return {heads, kv_heads, head_dim, q_norm_size, k_norm_size, value_dim ? value_dim : head_dim};
}

DeltaShape make_delta_shape(int64_t k_heads, int64_t v_heads, int64_t k_dim, int64_t v_dim, int64_t conv_width,
                            const std::vector<std::pair<int64_t, int64_t>>& columns, int64_t projected, int64_t gates,
                            bool sigmoid) {
  expect(k_heads > 0 && v_heads % k_heads == 0 && k_dim > 0 && v_dim > 0,
         "delta: the value heads do not share key heads");
  expect(1 <= conv_width && conv_width <= 8, "delta: the convolution must be 1 to 8 tokens wide");
  expect(columns.size() == 6, "delta: columns of q, k, v, z, beta and decay are needed");
  const auto at = [&](size_t i) { return DeltaShape::Columns{columns[i].first, columns[i].second}; };
  const DeltaShape shape{k_heads, v_heads, k_dim, v_dim, conv_width, at(0), at(1),
                         at(2),   at(3),   at(4), at(5), projected,  gates, sigmoid};
  const auto inside = [&](const DeltaShape::Columns& c, int64_t width, int64_t row) {
    expect(c.first >= 0 && c.step >= 0 && c.first + (k_heads - 1) * c.step + width <= row,
           "delta: a head's columns lie outside the row");
  };
  const int64_t values = shape.group() * v_dim;
  inside(shape.q, k_dim, projected), inside(shape.k, k_dim, projected), inside(shape.v, values, projected);
  inside(shape.z, values, projected), inside(shape.beta, shape.group(), gates),
      inside(shape.decay, shape.group(), gates);
  return shape;
}

DenseOps::Route make_route(int64_t experts, int64_t top_k, int64_t groups, int64_t top_groups, int64_t shared,
                           bool sigmoid, bool normalize, bool group_by_top2, float scale, float epsilon) {
  expect(1 <= top_k && top_k <= experts && shared >= 0, "route: top_k must be between 1 and the number of experts");
  expect(groups >= 1 && experts % groups == 0 && 1 <= top_groups && top_groups <= groups &&
             top_groups * (experts / groups) >= top_k,
         "route: the groups do not fit the experts");
  return {nullptr,    nullptr, nullptr, nullptr,   experts,       top_k, groups,
          top_groups, shared,  sigmoid, normalize, group_by_top2, scale, epsilon};
}

}  // namespace

void bind_dense(nb::module_& m) {
  nb::class_<BatchView>(m, "BatchView", "A checked copy of a step's index arrays.")
      .def(nb::new_(&make_batch), nb::arg("positions"), nb::arg("cache_slots"), nb::arg("query_starts"),
           nb::arg("seq_lens"), nb::arg("block_tables"), nb::arg("page_size"), nb::arg("num_pages"),
           nb::arg("slots") = nb::none(), nb::arg("state_lens") = nb::none(), nb::arg("num_verified") = nb::none())
      .def("become", &become, nb::arg("other"), "Takes over the indices of another batch of as many rows.");
  nb::class_<DenseOps::Heads>(m, "Heads",
                              "Head counts; a norm size of 0: no q or k norm; value_dim 0: as wide as keys.")
      .def(nb::new_(&make_heads), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
           nb::arg("q_norm_size") = 0, nb::arg("k_norm_size") = 0, nb::arg("value_dim") = 0);
  nb::class_<DeltaShape>(m, "DeltaShape", "Sizes of a gated delta net, and where its projections lie in a row.")
      .def(nb::new_(&make_delta_shape), nb::arg("k_heads"), nb::arg("v_heads"), nb::arg("k_dim"), nb::arg("v_dim"),
           nb::arg("conv_width"), nb::arg("columns"), nb::arg("projected"), nb::arg("gates"),
           nb::arg("sigmoid") = false, "columns: (first, step from key head to key head) of q, k, v, z, beta, decay.");
  nb::class_<DenseOps::Route>(m, "Route", "How logits become experts and weights.")
      .def(nb::new_(&make_route), nb::arg("experts"), nb::arg("top_k"), nb::arg("groups"), nb::arg("top_groups"),
           nb::arg("shared"), nb::arg("sigmoid"), nb::arg("normalize"), nb::arg("group_by_top2"), nb::arg("scale"),
           nb::arg("epsilon"))
      .def_rw("least_sum", &DenseOps::Route::least_sum, "What chosen weights are divided by is at least this.");
  nb::class_<Ops>(m, "DenseOps", "Norm, rotation, attention and routing on a pool.")
      .def(nb::init<std::shared_ptr<WorkerPool>, const std::string&>(), nb::arg("pool"), nb::arg("tier"))
      .def("rms_norm", &Ops::rms_norm, nb::arg("x"), nb::arg("residual").none(), nb::arg("weight"), nb::arg("out"),
           nb::arg("eps"))
      .def("rope_store", &Ops::rope_store, nb::arg("batch"), nb::arg("heads"), nb::arg("qkv"), nb::arg("cos"),
           nb::arg("sin"), nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("k_pages"),
           nb::arg("v_pages").none(), nb::arg("q"), nb::arg("eps"), "v_pages None: keys are values, too.")
      .def("attention", &Ops::attention, nb::arg("batch"), nb::arg("heads"), nb::arg("q"), nb::arg("k_pages"),
           nb::arg("v_pages").none(), nb::arg("out"), nb::arg("scale"), nb::arg("window"),
           nb::arg("sinks") = nb::none())
      .def("route", &Ops::route, nb::arg("rule"), nb::arg("logits"), nb::arg("bias").none(), nb::arg("ids"),
           nb::arg("weights"), nb::arg("tokens") = nb::none(), nb::arg("seen") = nb::none(),
           nb::arg("chosen") = nb::none())
      .def("delta_rule", &Ops::delta_rule, nb::arg("batch"), nb::arg("shape"), nb::arg("projected"), nb::arg("gates"),
           nb::arg("conv"), nb::arg("decay"), nb::arg("dt_bias"), nb::arg("norm"), nb::arg("inputs"),
           nb::arg("kept_gates"), nb::arg("memory"), nb::arg("out"), nb::arg("eps"))
      .def("fill_memory", &Ops::fill_memory, nb::arg("data"), nb::arg("value"), "What read_memory is to read.")
      .def("read_ranges", &Ops::read_ranges, nb::arg("of_node"), "Reads each node's ranges once, with all workers.")
      .def("read_memory", &Ops::read_memory, nb::arg("data"), "Reads once with all workers; returns a checksum.");
}

}  // namespace tandem
