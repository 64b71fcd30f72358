// Packed bytes out of and into matrices and expert layers, and the file they may lie in.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "bindings/bindings.h"
#include "bindings/names.h"
#include "bindings/tensor.h"
#include "experts/store/expert_store.h"
#include "ops/dense.h"
#include "ops/matrix.h"
#include "runtime/bulk_copy.h"
#include "runtime/checksum.h"
#include "runtime/files/mapped_file.h"
#include "runtime/tiers.h"

namespace nb = nanobind;

namespace tandem {
namespace {

// To be raised whenever packed bytes change their meaning, so that files of packed weights are made anew.
constexpr int kLayoutVersion = 6;

using Bytes = nb::ndarray<nb::memview, const uint8_t, nb::ndim<1>>;
using FormatNames = std::tuple<std::string, int, std::string>;

Bytes view(const void* data, int64_t bytes, nb::handle owner) {
  return Bytes(static_cast<const uint8_t*>(data), {size_t(bytes)}, owner);
}

FormatNames names_of(const WeightFormat& f) { return {kFormatNames[int(f.format)], f.group, scales_name_of(f)}; }

WeightFormat format_of(const FormatNames& names) {
  return weight_format_named(std::get<0>(names), std::get<1>(names), std::get<2>(names));
}

std::shared_ptr<MappedFile> map_file(int fd, size_t bytes) {
  try {
    return std::make_shared<MappedFile>(fd, bytes);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

std::vector<uint64_t> checksums(WorkerPool& pool, const nb::list& data, int64_t block_bytes, bool in_place) {
  if (block_bytes < 1) throw std::invalid_argument("block_bytes must be at least 1");
  std::vector<ByteRange> ranges;
  for (const nb::handle part : data) {
    const TensorView bytes = view_of(part, "data", {Element::byte}, {kAnySize});
    ranges.push_back({static_cast<const uint8_t*>(bytes.data), bytes.shape[0]});
  }
  const nb::gil_scoped_release unlocked;
  return block_checksums(pool, ranges, block_bytes, in_place);
}

void copy_bytes(WorkerPool& pool, nb::handle source, nb::handle out) {
  const TensorView from = view_of(source, "source", {Element::byte}, {kAnySize});
  const TensorView to = view_of(out, "out", {Element::byte}, {from.shape[0]}, true);
  const nb::gil_scoped_release unlocked;
  copy_out(pool, static_cast<const uint8_t*>(from.data), from.shape[0], static_cast<uint8_t*>(to.data));
}

uint64_t checksum(const nb::bytes& data) {
  return xxh64(static_cast<const uint8_t*>(data.data()), int64_t(data.size()));
}

uint64_t large_checksum(const nb::bytes& data, const std::string& tier) {
  return xxh3(static_cast<const uint8_t*>(data.data()), int64_t(data.size()), dense_kernels(tier));
}

nb::tuple matrix_bytes(nb::handle_t<PackedMatrix> self) {
  const PackedMatrix& m = nb::cast<const PackedMatrix&>(self);
  const WeightView& w = m.layout();
  return nb::make_tuple(view(w.panels, packed_bytes(w), self),
                        view(m.bias(), m.bias() ? w.columns * int64_t(sizeof(float)) : 0, self));
}

FormatNames matrix_format(const PackedMatrix& m) { return names_of(format_of(m.layout())); }

std::unique_ptr<PackedMatrix> adopt_matrix(std::shared_ptr<Workspace> workspace, const FormatNames& format,
                                           int64_t rows, int64_t depth, std::shared_ptr<MappedFile> file,
                                           int64_t offset, nb::handle bias) {
  TensorView view;
  const float* floats = optional_floats(bias, "bias", rows, &view);
  return std::make_unique<PackedMatrix>(std::move(workspace), format_of(format), rows, depth, std::move(file), offset,
                                        floats);
}

nb::tuple expert_bytes(nb::handle_t<ExpertStore> self) {
  const ByteRange packed = nb::cast<const ExpertStore&>(self).packed();
  return nb::make_tuple(view(packed.data, packed.bytes, self));
}

std::tuple<FormatNames, FormatNames, FormatNames> expert_formats(const ExpertStore& layer) {
  return {names_of(layer.shape().gate), names_of(layer.shape().up), names_of(layer.shape().down)};
}

void adopt_experts(ExpertStore& layer, std::shared_ptr<MappedFile> file, int64_t offset) {
  layer.adopt(std::move(file), offset);
}

}  // namespace

void bind_packed(nb::module_& m) {
  nb::class_<MappedFile>(m, "MappedFile", "A file mapped read-only; it stays mapped while packed weights lie in it.")
      .def(nb::new_(&map_file), nb::arg("fd"), nb::arg("bytes"), "Throws OSError.")
      .def("__len__", &MappedFile::bytes)
      .def(
          "view",
          [](nb::handle_t<MappedFile> self, int64_t offset, int64_t length) {
            return view(nb::cast<const MappedFile&>(self).at(offset, length), length, self);
          },
          nb::arg("offset"), nb::arg("length"));
  m.attr("LAYOUT_VERSION") = kLayoutVersion;
  m.def(
      "block_checksums", &checksums, nb::arg("pool"), nb::arg("data"), nb::arg("block_bytes"), nb::arg("in_place"),
      "XXH3 of each block of each array (XXH64 of one below 241), in parallel; not in place: read from mapped files.");
  m.def("copy_bytes", &copy_bytes, nb::arg("pool"), nb::arg("source"), nb::arg("out"),
        "On all workers; what lies in a mapped file is read from it.");
  m.def("xxh64", &checksum, nb::arg("data"));
  m.def("xxh3", &large_checksum, nb::arg("data"), nb::arg("tier"), "Of more than 240 bytes.");
  m.def("matrix_bytes", &matrix_bytes, nb::arg("matrix"), "Panels and bias (float32), as they lie in memory.");
  m.def("matrix_format", &matrix_format, nb::arg("matrix"), "Format, group, scale type.");
  m.def("adopt_matrix", &adopt_matrix, nb::arg("workspace"), nb::arg("format"), nb::arg("rows"), nb::arg("depth"),
        nb::arg("file"), nb::arg("offset"), nb::arg("bias").none(),
        "A matrix whose panels lie in the file; bias may be empty.");
  m.def("expert_bytes", &expert_bytes, nb::arg("layer"), "Panels of all experts.");
  m.def("expert_formats", &expert_formats, nb::arg("layer"), "Format, group, scale type of gate, of up and of down.");
  m.def("adopt_experts", &adopt_experts, nb::arg("layer"), nb::arg("file"), nb::arg("offset"),
        "The layer's experts, as they lie in the file.");
}

}  // namespace tandem
