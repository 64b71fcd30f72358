"""Mechanisms, a folder each: what it is (`shape`), what it takes (`cost`), its kernels, how a model has it (`block`).

`shape` and `cost` import no kernel, so that planner and configurations may ask them.
"""

