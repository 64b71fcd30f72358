#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "ops/workspace.h"
#include "runtime/cpu_features.h"
#include "runtime/files/readable_file.h"
#include "runtime/memory.h"
#include "runtime/tiers.h"
#include "runtime/worker_pool.h"

namespace nb = nanobind;

namespace tandem {

void bind_runtime(nb::module_& m) {
  m.attr("SCRATCH_BYTES_PER_WORKER") = Workspace::kWorkerBytes;
  m.attr("MAX_RANGES_AHEAD") = SureReads::kRanges;
  nb::class_<ByteRange>(m, "ByteRange", "Packed weights somewhere in memory.").def_ro("bytes", &ByteRange::bytes);
  nb::class_<WorkerPool>(m, "WorkerPool",
                         "One pinned worker per entry of cpus (-1: not pinned); the caller is worker 0.")
      .def(nb::init<std::vector<int>, int, std::vector<int>, std::vector<int>>(), nb::arg("cpus"),
           nb::arg("spin_us") = 200, nb::arg("nodes") = std::vector<int>{},
           nb::arg("memory_nodes") = std::vector<int>{},
           "nodes: of each worker, from 0. memory_nodes: where each node's memory is; empty: anywhere.")
      .def("__len__", &WorkerPool::size)
      .def_prop_ro("nodes", &WorkerPool::nodes, "How many memory nodes its workers belong to.")
      .def("start_latency", &region_start_latency, nb::arg("repeats"), nb::call_guard<nb::gil_scoped_release>(),
           "Seconds an empty parallel region takes, mean over repeats.");
  nb::class_<ReadableFile>(m, "ReadableFile",
                           "While it lives, packing reads what is mapped at `address` from the open file `fd`.")
      .def(
          "__init__",
          [](ReadableFile* self, int fd, uintptr_t address, size_t bytes) {
            new (self) ReadableFile(fd, reinterpret_cast<const uint8_t*>(address), bytes);
          },
          nb::arg("fd"), nb::arg("address"), nb::arg("bytes"));
  m.def("buffer_bytes", &HugeBuffer::total_bytes, "Of all packed weights and scratch, touched or not.");
  m.def("heap_bytes", &heap_bytes, "What malloc has given out; 0 where nobody knows.");
  m.def("return_free_memory", &return_free_memory, nb::call_guard<nb::gil_scoped_release>(),
        "What malloc has kept of freed memory goes back to the system.");
  m.def("cpu_tiers", &cpu_tiers, "Kernel tiers this CPU runs, built or not, slowest first.");
  m.def("built_tiers", &built_tiers, "Kernel tiers in this extension, slowest first; amx_standin is for tests.");
  m.def("supported_tiers", &supported_tiers, "Kernel tiers that were built and that this CPU runs, slowest first.");
  m.def("cpu_model", [] { return cpu_features().model; }, "The CPU's own name for itself.");
}

}  // namespace tandem
