"""`python -m tandem.cli.prepare`: builds the demo model, or fetches a model by name, for `kt serve`.

The command line comes through stdin, so that a key in it is not seen in `ps`. When `kt serve` ends, so does this.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence

from tandem.cli.app import fail
from tandem.cli.serve import possible_config
from tandem.engine.start.model_files import prepare
from tandem.engine.start.planning import Planned
from tandem.errors import TandemError, exit_status
from tandem.planner.memory import gib
from tandem.process.children import signal_at_end_of


def main(argv: Sequence[str]) -> None:
    config = possible_config([word for word in argv if word != "--force"])
    prepare(config, say_coming, force="--force" in argv)


def clean_before_end() -> None:
    """SIGTERM is as Ctrl+C: what is half built is removed. Of several signals only the first counts, or the second
    would interrupt that."""
    interrupts = list[int]()

    def interrupt(number: int, _frame: object) -> None:
        interrupts.append(number)
        if len(interrupts) == 1:
            raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)


def _parent() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of `kt serve`")
    return int(parser.parse_args().parent)


def say_coming(planned: Planned, nbytes: int) -> None:
    """Before a download: that it will fit, what it takes, and how fast it will be."""
    memory = ", ".join(
        f"{gib(ledger.total_bytes)} of {gib(ledger.free_bytes)} {ledger.place}"
        for ledger in planned.plan.ledgers
    )
    speed = f"{_speed_text(planned)}; " if planned.model.moe_layers else ""
    print(f"it fits: {memory}; {speed}{nbytes / 1e9:.1f} GB are fetched first", file=sys.stderr, flush=True)


def _speed_text(planned: Planned) -> str:
    """From how fast this machine reads its memory, which takes a second to measure."""
    from tandem.bench.probes import cpu_speeds
    from tandem.kernels.this_machine import this_machine
    from tandem.planner.forecast.machine_spec import MachineWish, wished_speeds
    from tandem.planner.forecast.prediction import Case, predict

    machine = this_machine()
    speeds = wished_speeds(MachineWish(), machine, cpu_speeds(machine, planned.plan.tier))
    decode = predict(Case.of_plan(planned.model, planned.stored, planned.plan, speeds)).decode[1]
    return f"decoding {decode.low:.1f} to {decode.high:.1f} tokens/s"


if __name__ == "__main__":
    try:
        clean_before_end()
        signal_at_end_of(_parent(), signal.SIGTERM)
        main(json.load(sys.stdin))
    except TandemError as error:
        fail(error, exit_status(error))
    except OSError as error:  # a full disk, a folder that may not be written
        fail(f"{error.filename or 'output'}: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        sys.exit(130)
