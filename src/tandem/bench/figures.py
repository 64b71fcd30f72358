"""Figures that a user asked for by a flag, drawn by Matplotlib: an optional package, and no window."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.spec.small_files import write_output


def check_matplotlib(flag: str = "--plot") -> None:
    """Raises ConfigError where the package is missing. Called before anything is read or measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(f'{flag} needs matplotlib: pip install "tandem-moe[bench]"') from None


def new_pyplot() -> Any:
    """`matplotlib.pyplot` that draws to files."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """A PNG file, all of it or nothing; the figure's memory is given back."""
    image = BytesIO()
    figure.savefig(image, dpi=120, format="png", **options)
    new_pyplot().close(figure)
    write_output(path, image.getvalue())
