"""`python -m tandem.cli.served_model`: one model's `kt serve`, for the front that started it.

The command line comes through stdin, so that it is not seen in `ps`. When the front ends, so does this.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys

from tandem.process.children import signal_at_end_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of the front")
    signal_at_end_of(parser.parse_args().parent, signal.SIGTERM)
    words = json.load(sys.stdin)
    from tandem.cli.app import run

    run(["serve", *words])


if __name__ == "__main__":
    main()
