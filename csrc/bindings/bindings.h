// One function per topic; module.cc calls each once.
#pragma once

#include <nanobind/nanobind.h>

namespace tandem {

void bind_runtime(nanobind::module_& m);  // pool.cc: WorkerPool, supported_tiers, cpu_model
void bind_dense(nanobind::module_& m);    // dense.cc: BatchView, Heads, DenseOps

}  // namespace tandem
