// Prints the kernel tiers that this CPU runs, for cmake/tiers.cmake: by the code that decides at run time, too.
#include <cstdio>

#include "runtime/cpu_features.h"

int main() {
  for (const std::string& tier : tandem::cpu_tiers()) std::printf("%s;", tier.c_str());
}
