"""Looks at the wheels of a release, and tries one in this environment.

    python scripts/check_wheels.py dist            # tags, and what lies in them
    python scripts/check_wheels.py dist --try      # then pip takes the one that fits, and the demo model answers

One wheel is for Python 3.11; one with the stable ABI is for 3.12 and later. `--try` installs over what is here, and
needs the dependencies: run it with the Python of an environment of its own, one for each version. Exit code 1:
something is wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

NAME = "tandem-moe"
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
GLIBC = "manylinux_2_35_x86_64"
WANTED = (
    "licenses/LICENSE", "licenses/LICENSE.third-party.txt", "vendor/LICENSES.txt", "page/static/index.html",
    "tandem/py.typed", "entry_points.txt",
)  # fmt: skip
QUESTION = """
from tandem import LLM, SamplingParams
question = [{"role": "user", "content": "What is the capital of France?"}]
print(LLM("demo").chat(question, SamplingParams(max_tokens=16, temperature=0))[0].text)
"""


def fitting(wheels: list[Path], version: tuple[int, int]) -> list[Path]:
    """Those that pip would take for this Python, on a Linux that is new enough."""
    tags = {*cpython_tags(version, platforms=[GLIBC]), *compatible_tags(version, platforms=[GLIBC])}
    return [wheel for wheel in wheels if parse_wheel_filename(wheel.name)[3] & tags]


def problems(wheels: list[Path]) -> Iterator[str]:
    for version in PYTHONS:
        found = fitting(wheels, version)
        if len(found) != 1:
            names = ", ".join(wheel.name for wheel in found) or "none"
            yield f"Python {version[0]}.{version[1]}: one wheel is wanted, and these fit: {names}"
    for wheel in wheels:
        yield from (f"{wheel.name}: {problem}" for problem in missing(wheel))


def missing(wheel: Path) -> Iterator[str]:
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in WANTED:
        if not any(name.endswith(wanted) for name in names):
            yield f"it lacks {wanted}"
    stable = "-abi3-" in wheel.name
    built = [name for name in names if name.startswith("tandem/_core.") and name.endswith(".so")]
    if len(built) != 1 or (".abi3." in built[0]) != stable:
        yield f"its extension is {built}"


def tried(folder: Path) -> str:
    """The demo model's answer about France's capital, from the wheel that pip chooses."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--find-links", str(folder), NAME], check=True)
    subprocess.run([sys.executable, "-P", "-m", "tandem", "version"], check=True)
    command = [sys.executable, "-P", "-c", QUESTION]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--try", action="store_true", dest="tries")
    arguments = parser.parse_args()
    wheels = sorted(arguments.folder.glob("*.whl"))
    found = list(problems(wheels))
    print("\n".join(found or [f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB" for wheel in wheels]))
    if arguments.tries and not found:
        answer = tried(arguments.folder)
        print(answer)
        return int("Paris" not in answer)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
