"""Short convolutions in plain torch."""

from tandem.mechanisms.recurrence.torch import bound

__all__ = ["bound"]
