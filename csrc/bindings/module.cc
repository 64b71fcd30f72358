#include <stdexcept>

#include "bindings/bindings.h"
#include "runtime/files/readable_file.h"
#include "runtime/ranks/shm_lane.h"

NB_MODULE(_core, m) {
  m.doc() = "Tandem's C++ core.";
  nanobind::set_leak_warnings(false);  // objects that module-level caches hold at exit are no news to a user
  // C++ says std::invalid_argument; users of the package catch TandemError.
  nanobind::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const std::invalid_argument& e) {
      const nanobind::object type = nanobind::module_::import_("tandem.errors").attr("KernelError");
      PyErr_SetString(type.ptr(), e.what());
    } catch (const tandem::UnreadableFile& e) {
      const nanobind::object type = nanobind::module_::import_("tandem.errors").attr("CheckpointError");
      PyErr_SetString(type.ptr(), e.what());
    } catch (const tandem::RankMissing& e) {
      const nanobind::object type = nanobind::module_::import_("tandem.errors").attr("RankLost");
      PyErr_SetString(type.ptr(), e.what());
    }
  });
  tandem::bind_runtime(m);
  tandem::bind_codes(m);
  tandem::bind_dense(m);
  tandem::bind_recurrent(m);
  tandem::bind_patches(m);
  tandem::bind_columns(m);
  tandem::bind_streams(m);
  tandem::bind_tables(m);
  tandem::bind_token_index(m);
  tandem::bind_matrix(m);
  tandem::bind_fit(m);
  tandem::bind_experts(m);
  tandem::bind_packed(m);
  tandem::bind_recording(m);
  tandem::bind_mailbox(m);
  tandem::bind_live(m);
  tandem::bind_ranks(m);
}
