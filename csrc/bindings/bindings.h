// One function per topic; module.cc calls each once.
#pragma once

#include <nanobind/nanobind.h>

namespace tandem {

void bind_runtime(nanobind::module_& m);    // pool.cc: WorkerPool, tiers, cpu_model
void bind_codes(nanobind::module_& m);      // codes.cc: Codes, WeightFormat
void bind_dense(nanobind::module_& m);      // dense.cc: BatchView, Heads, DenseOps
void bind_matrix(nanobind::module_& m);     // matrix.cc: Workspace, PackedMatrix
void bind_packed(nanobind::module_& m);     // packed.cc: MappedFile, packed bytes out of and into the two above
void bind_fit(nanobind::module_& m);        // fit.cc: fit_groups
void bind_experts(nanobind::module_& m);    // experts.cc: ExpertStore
void bind_patches(nanobind::module_& m);    // patches.cc: PatchOps
void bind_columns(nanobind::module_& m);    // columns.cc: Columns
void bind_recurrent(nanobind::module_& m);  // recurrent.cc: RecurrentOps
void bind_recording(nanobind::module_& m);
void bind_streams(nanobind::module_& m);  // streams.cc: Streams
void bind_tables(nanobind::module_& m);   // tables.cc: RowNumbers, RowReader
void bind_token_index(nanobind::module_& m);
void bind_mailbox(nanobind::module_& m);  // mailbox.cc: Mailbox
void bind_live(nanobind::module_& m);     // live.cc: MovingLayers, ExpertMoves, what live placement counts
void bind_ranks(nanobind::module_& m);    // ranks.cc: ShmLane

}  // namespace tandem
