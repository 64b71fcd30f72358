# Which kernel tiers are compiled (TANDEM_BUILT_TIERS), and with what flags (tandem_tier_sources).
set(TANDEM_TIERS auto CACHE STRING
    "Kernel tiers beside scalar: auto (the best that this CPU runs), all, or names with commas between them")
option(TANDEM_FAST_FOREIGN "Compile tiers that this CPU cannot run at -O1, as CI does" OFF)

set(TANDEM_ALL_TIERS scalar avx2 avx512 avx512_bf16 amx amx_standin)
set(TANDEM_DENSE_TIERS scalar avx2 avx512 avx512_bf16)

# GCC 12's own AVX-512 headers raise false -Wmaybe-uninitialized warnings.
set(TIER_FLAGS -fno-lto -fno-exceptions -fno-rtti -ffp-contract=off -Wno-maybe-uninitialized -Wno-uninitialized)
# For CPUs without AVX2, and for tests: at -O3 these two took longer to compile than all the rest. -Wno-psabi: vectors
# wider than registers are passed in memory, and only within a unit.
set(TIER_FLAGS_scalar -O1 -Wno-psabi)
set(TIER_FLAGS_amx_standin -O1 -Wno-psabi)
set(TIER_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi -mbmi2)
set(TIER_FLAGS_avx512 ${TIER_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
set(TIER_FLAGS_avx512_bf16 ${TIER_FLAGS_avx512} -mavx512vnni -mavx512bf16 -mavx512vbmi)
set(TIER_FLAGS_amx ${TIER_FLAGS_avx512_bf16} -mavx512fp16 -mamx-tile -mamx-bf16 -mamx-int8)

# The tiers that this CPU runs, slowest first: by the code that decides at run time, compiled for any CPU.
function(tandem_find_cpu_tiers found)
  if(CMAKE_CROSSCOMPILING)
    set(${found} scalar PARENT_SCOPE)
    return()
  endif()
  set(source "${CMAKE_CURRENT_SOURCE_DIR}")
  set(program "${CMAKE_CURRENT_BINARY_DIR}/cpu_tiers")
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -std=c++20 "-I${source}/csrc" "${source}/cmake/cpu_tiers.cc"
                          "${source}/csrc/runtime/cpu_features.cc" -o "${program}"
                  RESULT_VARIABLE failed ERROR_VARIABLE why)
  if(failed)
    message(FATAL_ERROR "${CMAKE_CXX_COMPILER} cannot compile C++20: GCC 11 or Clang 14 is needed.\n${why}")
  endif()
  execute_process(COMMAND "${program}" RESULT_VARIABLE failed OUTPUT_VARIABLE tiers)
  if(failed)
    message(FATAL_ERROR "${program}, which looks at the CPU, ended with ${failed}; name tiers: -DTANDEM_TIERS=all")
  endif()
  list(REMOVE_ITEM tiers "")
  set(${found} ${tiers} PARENT_SCOPE)
endfunction()

# Whether the compiler has a tier's flags: GCC 11 lacks AVX512-FP16.
function(tandem_check_compiler tier result)
  set(flags ${TIER_FLAGS_${tier}})
  string(REPLACE ";" " " CMAKE_REQUIRED_FLAGS "${flags}")
  include(CheckCXXSourceCompiles)
  check_cxx_source_compiles("int main() { return 0; }" TANDEM_COMPILES_${tier})
  set(${result} ${TANDEM_COMPILES_${tier}} PARENT_SCOPE)
endfunction()

# `auto` takes the best that both the CPU and the compiler have; what was asked for by name must be possible.
function(tandem_choose_tiers chosen)
  if(TANDEM_TIERS STREQUAL "auto")
    set(tiers scalar)
    foreach(tier IN LISTS TANDEM_CPU_TIERS)
      tandem_check_compiler(${tier} compiles)
      if(compiles)
        set(tiers scalar ${tier})
      else()
        message(WARNING "This CPU runs kernel tier ${tier}, which needs a newer compiler: GCC 12 or Clang 16 (CXX=g++-12).")
      endif()
    endforeach()
  elseif(TANDEM_TIERS STREQUAL "all")
    set(tiers ${TANDEM_ALL_TIERS})
  else()
    string(REPLACE "," ";" tiers "scalar,${TANDEM_TIERS}")
  endif()
  list(REMOVE_DUPLICATES tiers)
  foreach(tier IN LISTS tiers)
    if(NOT tier IN_LIST TANDEM_ALL_TIERS)
      string(REPLACE ";" ", " known "${TANDEM_ALL_TIERS}")
      message(FATAL_ERROR "TANDEM_TIERS=${TANDEM_TIERS}: there is no kernel tier \"${tier}\"; take auto, all, or some of ${known}.")
    endif()
    tandem_check_compiler(${tier} compiles)
    if(NOT compiles)
      message(FATAL_ERROR "Kernel tier ${tier} needs a newer compiler: GCC 12 or Clang 16 (CXX=g++-12). "
                          "Or leave it out: TANDEM_TIERS=avx512_bf16, for instance.")
    endif()
  endforeach()
  set(${chosen} ${tiers} PARENT_SCOPE)
endfunction()

# Adds the units of `tier` that match `pattern` to TANDEM_TIER_SOURCES, with the tier's flags.
macro(tandem_tier_sources tier pattern)
  file(GLOB units CONFIGURE_DEPENDS ${pattern})
  set(flags ${TIER_FLAGS} ${TIER_FLAGS_${tier}})
  if(TANDEM_FAST_FOREIGN AND NOT ${tier} IN_LIST TANDEM_CPU_TIERS AND NOT ${tier} STREQUAL "amx_standin")
    list(APPEND flags -O1)
  endif()
  set_source_files_properties(${units} PROPERTIES COMPILE_OPTIONS "${flags}")
  list(APPEND TANDEM_TIER_SOURCES ${units})
endmacro()

tandem_find_cpu_tiers(TANDEM_CPU_TIERS)
tandem_choose_tiers(TANDEM_BUILT_TIERS)
message(STATUS "Kernel tiers: ${TANDEM_BUILT_TIERS} (TANDEM_TIERS=${TANDEM_TIERS}; this CPU runs ${TANDEM_CPU_TIERS})")
foreach(tier IN LISTS TANDEM_BUILT_TIERS)
  tandem_tier_sources(${tier} csrc/tier/${tier}/*.cc)
  list(APPEND TANDEM_TIER_DEFINITIONS TANDEM_BUILDS_${tier})
endforeach()
# The dense kernels of all tiers are always built. They are small, and packing and checksums take the widest ones, so
# that what they make does not depend on the choice above.
foreach(tier IN LISTS TANDEM_DENSE_TIERS)
  tandem_tier_sources(${tier} csrc/tier/dense/${tier}.cc)
endforeach()
set_source_files_properties(csrc/runtime/tiers.cc PROPERTIES COMPILE_DEFINITIONS "${TANDEM_TIER_DEFINITIONS}")
