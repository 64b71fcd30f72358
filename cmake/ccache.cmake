# ccache where it is installed. With paths below this directory made relative, a fresh clone elsewhere finds what an
# older one compiled.
option(TANDEM_CCACHE "Compile through ccache where it is installed" ON)
if(TANDEM_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(TANDEM_CCACHE_PROGRAM ccache)
  mark_as_advanced(TANDEM_CCACHE_PROGRAM)
  if(TANDEM_CCACHE_PROGRAM)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${CMAKE_CURRENT_SOURCE_DIR}"
                                    CCACHE_NOHASHDIR=1 "${TANDEM_CCACHE_PROGRAM}")
  endif()
endif()
