"""Short convolutions on the C++ core."""

from tandem.mechanisms.recurrence.cpu import bound

__all__ = ["bound"]
