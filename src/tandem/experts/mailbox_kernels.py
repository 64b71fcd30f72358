"""The GPU's end of the hand-off: the three small CUDA kernels of mailbox_kernels.cu, compiled at run time (NVRTC).

Mapped memory is written with ordinary stores and read with loads that no cache answers. The number is raised last,
after a fence of the whole system: a reader of the number sees all that was written before
(csrc/experts/handoff/mailbox.h).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from tandem.kernels.gpu.nvrtc import compiled, cuda_source

HEADER = Path(__file__).with_name("mailbox_words.h").read_text(encoding="utf-8")
WORDS = {name: int(number) for name, number in re.findall(r"k(\w+) = (\d+)", HEADER)}
"""Places of the words in a mailbox's header, by name: `Posted`, `Layer`, …"""

GAVE_UP = WORDS["GaveUp"]  # the word by which the GPU says so

SOURCE = HEADER + cuda_source(__file__)


@cache
def kernels(device_index: int | None) -> list[Any]:
    """post, collect and hint, on a device; None: the current one."""
    return compiled(SOURCE, ("post", "collect", "hint"), device_index)
