"""`kt`: the command line. Nothing heavy is imported before a command runs, so that help is instant."""

from __future__ import annotations


def main() -> None:
    """The console script `kt` (and `tandem`): runs one command and exits with its status."""
    from tandem.cli.standard_files import open_standard_files

    open_standard_files()
    from tandem.cli.app import run

    run()


__all__ = ["main"]
