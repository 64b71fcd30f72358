// The choice of tokens, and attention over it: arrays in, checked, and nothing else.
#include "ops/token_index.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor.h"
#include "runtime/tiers.h"

namespace nb = nanobind;

namespace tandem {
namespace {

struct TokenIndex {
  TokenIndex(std::shared_ptr<WorkerPool> workers, const std::string& tier, int64_t heads, int64_t dim, int64_t half,
             int64_t budget, bool neighbours, int64_t tokens)
      : pool(std::move(workers)),
        dense{*pool, dense_kernels(tier)},
        shape{heads, dim, half, budget, neighbours, tokens} {
    if (heads < 1 || dim < 1 || budget < 1 || half < 0 || 2 * half > dim)
      throw KernelError("token index: heads, channels and budget must be positive, and as many channels turn at most");
    if (tokens < 1 || budget % tokens) throw KernelError("token index: a pool's tokens must divide the budget");
  }

  void choose(const BatchView& batch, nb::handle q, nb::handle k, nb::handle gates, nb::handle norm, nb::handle bias,
              nb::handle cos, nb::handle sin, nb::handle pages, nb::handle chosen, nb::handle counts, float eps) const {
    const int64_t rows = batch.rows();
    const TensorView in = view_of(q, "q", {Element::bf16, Element::f32}, {rows, shape.heads * shape.dim});
    expect(k.is_none() == (shape.pool > 1), "token index: keys of pools are stored before, and others are given");
    expect(batch.page_size % shape.pool == 0, "token index: a page has no whole pools");
    const void* keys = k.is_none() ? nullptr : view_of(k, "k", {in.element}, {rows, shape.dim}).data;
    const TensorView g = view_of(gates, "gates", {Element::f32}, {rows, shape.heads});
    const TensorView w = view_of(norm, "norm", {Element::f32}, {shape.dim});
    const TensorView b = view_of(bias, "bias", {Element::f32}, {shape.dim});
    const TensorView c = view_of(cos, "cos", {Element::f32}, {kAnySize, shape.half});
    const TensorView s = view_of(sin, "sin", {Element::f32}, {c.shape[0], shape.half});
    const TensorView kept =
        view_of(pages, "pages", {in.element}, {batch.num_pages, batch.page_size / shape.pool, 1, shape.dim}, true);
    const TensorView out = view_of(chosen, "chosen", {Element::i32}, {rows, shape.width()}, true);
    const TensorView n = view_of(counts, "counts", {Element::i32}, {rows}, true);
    const IndexCall call{in.data,
                         keys,
                         static_cast<float*>(g.data),
                         static_cast<float*>(w.data),
                         static_cast<float*>(b.data),
                         eps,
                         static_cast<float*>(c.data),
                         static_cast<float*>(s.data),
                         c.shape[0],
                         kept.data,
                         static_cast<int32_t*>(out.data),
                         static_cast<int32_t*>(n.data),
                         in.type()};
    if (Recording* recording = Recording::current()) recording->keep(nb::find(&batch));
    perform(*this, [this, &batch, call] { choose_tokens(dense, batch, shape, call); });
  }

  std::shared_ptr<WorkerPool> pool;
  DenseOps dense;
  IndexShape shape;
};

struct ChosenAttention {
  ChosenAttention(std::shared_ptr<WorkerPool> workers, const std::string& tier)
      : pool(std::move(workers)), dense{*pool, dense_kernels(tier)} {}

  void attend(const BatchView& batch, nb::handle q, nb::handle pages, nb::handle chosen, nb::handle counts,
              nb::handle out, float scale) const {
    const TensorView in = view_of(q, "q", {Element::bf16, Element::f32}, {batch.rows(), kAnySize, kAnySize});
    const DenseOps::Heads heads{in.shape[1], 1, in.shape[2], 0, 0, in.shape[2]};
    const TensorView kept =
        view_of(pages, "pages", {in.element}, {batch.num_pages, batch.page_size, 1, heads.head_dim}, true);
    const TensorView which = view_of(chosen, "chosen", {Element::i32}, {batch.rows(), kAnySize});
    const TensorView n = view_of(counts, "counts", {Element::i32}, {batch.rows()});
    const TensorView y = view_of(out, "out", {in.element}, {batch.rows(), heads.heads * heads.head_dim}, true);
    const DenseOps::Attention call{in.data, kept.data, nullptr, y.data, scale, 0, in.type()};
    if (Recording* recording = Recording::current()) recording->keep(nb::find(&batch));
    perform(*this,
            [this, &batch, heads, call, rows = static_cast<int32_t*>(which.data), seen = static_cast<int32_t*>(n.data),
             width = which.shape[1]] { attend_chosen(dense, batch, heads, call, rows, seen, width); });
  }

  std::shared_ptr<WorkerPool> pool;
  DenseOps dense;
};

}  // namespace

void bind_token_index(nb::module_& m) {
  nb::class_<TokenIndex>(m, "TokenIndex", "Which tokens each row attends to, on a pool.")
      .def(nb::init<std::shared_ptr<WorkerPool>, const std::string&, int64_t, int64_t, int64_t, int64_t, bool,
                    int64_t>(),
           nb::arg("pool"), nb::arg("tier"), nb::arg("heads"), nb::arg("dim"), nb::arg("half"), nb::arg("budget"),
           nb::arg("neighbours"), nb::arg("tokens"))
      .def("choose", &TokenIndex::choose, nb::arg("batch"), nb::arg("q"), nb::arg("k").none(), nb::arg("gates"),
           nb::arg("norm"), nb::arg("bias"), nb::arg("cos"), nb::arg("sin"), nb::arg("pages"), nb::arg("chosen"),
           nb::arg("counts"), nb::arg("eps"));
  nb::class_<ChosenAttention>(m, "ChosenAttention", "Attention whose rows see chosen tokens; keys are values, too.")
      .def(nb::init<std::shared_ptr<WorkerPool>, const std::string&>(), nb::arg("pool"), nb::arg("tier"))
      .def("attend", &ChosenAttention::attend, nb::arg("batch"), nb::arg("q"), nb::arg("pages"), nb::arg("chosen"),
           nb::arg("counts"), nb::arg("out"), nb::arg("scale"));
}

}  // namespace tandem
