"""Short convolutions on a GPU."""

from tandem.mechanisms.recurrence.gpu.folds import bound

__all__ = ["bound"]
