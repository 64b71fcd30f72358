"""Copies the page's libraries from npm into the package: `make page-vendor`. Building Tandem needs no npm.

Versions stand in package.json and, with the hash of each archive, in package-lock.json. Scripts of packages do not run.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
VENDOR = HERE.parents[1] / "src" / "tandem" / "server" / "page" / "static" / "vendor"
FILES = (
    "dompurify/dist/purify.min.js", "katex/dist/katex.min.js", "markdown-it/dist/browser/markdown-it.umd.min.js"
)  # fmt: skip
STYLES, FONTS = "katex/dist/katex.min.css", "katex/dist/fonts"
NOT_COPIED = ("", "node_modules/@types/trusted-types", "node_modules/argparse", "node_modules/commander")
NOTICE = "Licences of the libraries in this folder, and of what they contain.\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, folder)
        subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, check=True)
        shutil.rmtree(VENDOR, ignore_errors=True)
        write(Path(folder) / "node_modules")
    data = {path: path.read_bytes() for path in sorted(VENDOR.rglob("*")) if path.is_file()}
    sums = [f"{hashlib.sha256(data[path]).hexdigest()}  {path.relative_to(VENDOR).as_posix()}\n" for path in data]
    (VENDOR / "SHA256SUMS").write_text("".join(sums))
    print(f"{len(data)} files, {sum(map(len, data.values())):,} bytes in {VENDOR}")


def write(modules: Path) -> None:
    (VENDOR / "fonts").mkdir(parents=True)
    for name in FILES:
        shutil.copy(modules / name, VENDOR)
    # Every browser that runs the page reads woff2.
    styles = re.sub(r',url\([^)]*\.(?:woff|ttf)\) format\("\w+"\)', "", (modules / STYLES).read_text())
    (VENDOR / Path(STYLES).name).write_text(styles)
    shutil.copy(HERE / "OFL.txt", VENDOR / "fonts")  # theirs; npm's archive lacks it
    for font in sorted((modules / FONTS).glob("*.woff2")):
        shutil.copy(font, VENDOR / "fonts")
    (VENDOR / "LICENSES.txt").write_text(NOTICE + "".join(licences(modules)))


def licences(modules: Path) -> Iterator[str]:
    """Licences of the libraries and of what their files contain: the other dependencies are for command lines."""
    lock = json.loads((HERE / "package-lock.json").read_text())
    for path, package in sorted(lock["packages"].items()):
        if path in NOT_COPIED:
            continue
        folder = modules.parent / path
        texts = sorted(each for each in folder.iterdir() if each.name.upper().startswith("LICENSE"))
        assert texts, f"{path} has no licence; leave it out"
        name = f"{path.removeprefix('node_modules/')} {package['version']} ({package['license']})"
        yield f"\n{'=' * 80}\n{name}\n{'=' * 80}\n"
        yield from (f"\n{text.read_text().strip()}\n" for text in texts)


if __name__ == "__main__":
    main()
