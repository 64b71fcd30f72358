"""Writes csrc/format/grid_codes.h: ggml's grids, as the `gguf` package has them, a number for each entry.

    python scripts/grid_codes.py > csrc/format/grid_codes.h
"""

from __future__ import annotations

import numpy as np
from gguf import quants

GRIDS = {
    "kIq2Xxs": quants.IQ2_XXS, "kIq2Xs": quants.IQ2_XS, "kIq2S": quants.IQ2_S, "kIq1": quants.IQ1_S,
    "kIq3Xxs": quants.IQ3_XXS, "kIq3S": quants.IQ3_S,
}  # fmt: skip
ACROSS = 15  # numbers of a line

HEAD = """// ggml's grids: of every entry the places of its 8 values (of 4, for IQ3) among the grid's own, k after k, in
// 2 bits each (3). scripts/grid_codes.py wrote this file.
#pragma once

#include <stdint.h>

namespace tandem {
namespace {

// clang-format off
"""
TAIL = """// clang-format on

}  // namespace
}  // namespace tandem
"""


def entries(quant: type) -> list[int]:
    quant.init_grid()
    grid = np.array(quant.grid)[0, 0]
    places = np.searchsorted(np.unique(grid), grid)
    bits = 2 if grid.shape[1] == 8 else 3
    return [sum(int(place) << bits * k for k, place in enumerate(row)) for row in places]


def main() -> None:
    print(HEAD, end="")
    for name, quant in GRIDS.items():
        numbers = [f"0x{entry:04x}" for entry in entries(quant)]
        print(f"constexpr uint16_t {name}[{len(numbers)}] = {{")
        for at in range(0, len(numbers), ACROSS):
            print("  " + ", ".join(numbers[at : at + ACROSS]) + ",")
        print("};")
    print(TAIL, end="")


if __name__ == "__main__":
    main()
