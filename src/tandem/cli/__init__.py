"""`kt`: the command line. Nothing heavy is imported before a command runs, so that help is instant."""

from __future__ import annotations


def main() -> None:
    """The console script `kt` (and `tandem`): runs one command and exits with its status."""
    from tandem.cli.app import run

    run()


__all__ = ["main"]
