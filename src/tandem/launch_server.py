"""`python -m tandem.launch_server --model MODEL …`, the same as `kt serve MODEL …`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs `kt serve` with this command line."""
    from tandem.cli.standard_files import open_standard_files

    open_standard_files()
    from tandem.cli.app import run

    run(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
