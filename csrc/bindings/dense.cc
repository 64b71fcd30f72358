// The dense operations. Tensors come as addresses: importing three torch tensors through DLPack costs 9 us per call,
// their data_ptr() 0.3 us, and a decode step makes hundreds of calls. kernels/cpu_ops.py checks shapes and types.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "ops/dense.h"

namespace nb = nanobind;

namespace tandem {
namespace {

using Address = uintptr_t;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

DType type_of(bool bf16) { return bf16 ? DType::bf16 : DType::f32; }

template <class T>
std::vector<T> copy_of(Address address, int64_t count) {
  return {at<const T>(address), at<const T>(address) + count};
}

// Owns nothing: `pool` outlives it through keep_alive.
struct Ops {
  Ops(WorkerPool& pool, const std::string& tier) : dense{pool, dense_kernels(tier)} {}

  void rms_norm(Address x, Address residual, Address weight, Address out, int64_t rows, int64_t n, float eps,
                bool bf16) const {
    dense.rms_norm(at(x), at(residual), at(weight), at(out), rows, n, eps, type_of(bf16));
  }

  void rope_store(const BatchView& batch, const DenseOps::Heads& heads, Address qkv, Address cos, Address sin,
                  int64_t table_rows, int64_t half, Address q_norm, Address k_norm, Address k_pages, Address v_pages,
                  Address q, float eps, bool bf16) const {
    dense.rope_store(batch, heads,
                     {at(qkv), at<float>(cos), at<float>(sin), table_rows, half, at(q_norm), at(k_norm), at(k_pages),
                      at(v_pages), at(q), eps, type_of(bf16)});
  }

  void attention(const BatchView& batch, const DenseOps::Heads& heads, Address q, Address k_pages, Address v_pages,
                 Address out, float scale, int64_t window, bool bf16) const {
    dense.attention(batch, heads, {at(q), at(k_pages), at(v_pages), at(out), scale, window, type_of(bf16)});
  }

  void route(int64_t rows, Address logits, Address bias, Address ids, Address weights, int64_t experts, int64_t top_k,
             int64_t groups, int64_t top_groups, bool sigmoid, bool normalize, bool group_by_top2, float scale,
             float epsilon) const {
    dense.route(rows, {at<float>(logits), at<float>(bias), at<int32_t>(ids), at<float>(weights), experts, top_k, groups,
                       top_groups, sigmoid, normalize, group_by_top2, scale, epsilon});
  }

  float read_memory(Address data, int64_t bytes) const { return dense.read_memory(at(data), bytes); }
  int64_t multiply_add(int64_t rounds, bool bf16) const { return dense.multiply_add(rounds, type_of(bf16)); }

  DenseOps dense;
};

}  // namespace

void bind_dense(nb::module_& m) {
  nb::class_<BatchView>(m, "BatchView", "A checked copy of a step's index tensors.")
      .def(
          "__init__",
          [](BatchView* self, Address positions, Address cache_slots, int64_t rows, Address query_starts,
             Address seq_lens, int64_t sequences, Address block_tables, int64_t table_width, int64_t page_size,
             int64_t num_pages) {
            new (self) BatchView(copy_of<int64_t>(positions, rows), copy_of<int64_t>(cache_slots, rows),
                                 copy_of<int32_t>(query_starts, sequences + 1), copy_of<int32_t>(seq_lens, sequences),
                                 copy_of<int32_t>(block_tables, sequences * table_width), page_size, num_pages);
          },
          nb::arg("positions"), nb::arg("cache_slots"), nb::arg("rows"), nb::arg("query_starts"), nb::arg("seq_lens"),
          nb::arg("sequences"), nb::arg("block_tables"), nb::arg("table_width"), nb::arg("page_size"),
          nb::arg("num_pages"));
  nb::class_<DenseOps::Heads>(m, "Heads", "Head counts; a norm size of 0 means no q or k norm.")
      .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t>(), nb::arg("heads"), nb::arg("kv_heads"),
           nb::arg("head_dim"), nb::arg("q_norm_size") = 0, nb::arg("k_norm_size") = 0);
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Ops>(m, "DenseOps", "Norm, rotation, attention and routing on a pool. All tensors are addresses.")
      .def(nb::init<WorkerPool&, const std::string&>(), nb::arg("pool"), nb::arg("tier"), nb::keep_alive<1, 2>())
      .def("rms_norm", &Ops::rms_norm, no_gil, nb::arg("x"), nb::arg("residual"), nb::arg("weight"), nb::arg("out"),
           nb::arg("rows"), nb::arg("n"), nb::arg("eps"), nb::arg("bf16"))
      .def("rope_store", &Ops::rope_store, no_gil, nb::arg("batch"), nb::arg("heads"), nb::arg("qkv"), nb::arg("cos"),
           nb::arg("sin"), nb::arg("table_rows"), nb::arg("half"), nb::arg("q_norm"), nb::arg("k_norm"),
           nb::arg("k_pages"), nb::arg("v_pages"), nb::arg("q"), nb::arg("eps"), nb::arg("bf16"))
      .def("attention", &Ops::attention, no_gil, nb::arg("batch"), nb::arg("heads"), nb::arg("q"), nb::arg("k_pages"),
           nb::arg("v_pages"), nb::arg("out"), nb::arg("scale"), nb::arg("window"), nb::arg("bf16"))
      .def("read_memory", &Ops::read_memory, no_gil, nb::arg("data"), nb::arg("bytes"),
           "Reads once with all workers; returns a checksum.")
      .def("multiply_add", &Ops::multiply_add, no_gil, nb::arg("rounds"), nb::arg("bf16"),
           "Multiply-adds in registers on all workers; returns the operations done.")
      .def("route", &Ops::route, no_gil, nb::arg("rows"), nb::arg("logits"), nb::arg("bias"), nb::arg("ids"),
           nb::arg("weights"), nb::arg("experts"), nb::arg("top_k"), nb::arg("groups"), nb::arg("top_groups"),
           nb::arg("sigmoid"), nb::arg("normalize"), nb::arg("group_by_top2"), nb::arg("scale"), nb::arg("epsilon"));
}

}  // namespace tandem
