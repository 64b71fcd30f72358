"""`loaded_is_kept`: Python's collector is kept from what will not go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loaded_is_kept() -> Iterator[None]:
    """The collector does not look at what is there now. A process with a model or a server has 200,000 to 400,000
    objects: all answers would pause for 0.1 to 0.3 s each time that some long prompts have come."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
