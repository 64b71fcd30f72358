#include "bindings/bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "Tandem's C++ core.";
  tandem::bind_runtime(m);
  tandem::bind_dense(m);
}
