#include "bindings/recording.h"

#include <stdexcept>

#include "bindings/bindings.h"

namespace nb = nanobind;

namespace tandem {
namespace {

thread_local Recording* being_made = nullptr;

}  // namespace

Recording* Recording::current() { return being_made; }

void Recording::begin() {
  if (being_made) throw std::invalid_argument("a recording is being made already");
  operations_.clear();
  kept_.clear();
  being_made = this;
}

void Recording::end() {
  if (being_made == this) being_made = nullptr;
}

void bind_recording(nb::module_& m) {
  nb::class_<Recording>(m, "Recording", "Operations with their arrays, to be run again; made inside `with`.")
      .def(nb::init<>())
      .def(
          "__enter__",
          [](Recording& self) -> Recording& {
            self.begin();
            return self;
          },
          nb::rv_policy::reference)
      .def(
          "__exit__", [](Recording& self, nb::handle, nb::handle, nb::handle) { self.end(); }, nb::arg().none(),
          nb::arg().none(), nb::arg().none())
      .def("__len__", &Recording::size)
      .def("run", &Recording::run, nb::call_guard<nb::gil_scoped_release>(), "All operations again, in order.");
}

}  // namespace tandem
