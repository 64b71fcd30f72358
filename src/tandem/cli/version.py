"""`kt version`."""

from __future__ import annotations

import importlib.metadata
import platform

import typer

from tandem import __version__

LIBRARIES = ("torch", "safetensors", "tokenizers", "msgspec", "fastapi")


def version() -> None:
    """Versions of Tandem, its kernels, Python and the libraries it stands on.

    Example: kt version
    """
    typer.echo(f"Tandem {__version__}")
    typer.echo(f"kernels {_kernels()}")
    typer.echo(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in LIBRARIES:
        typer.echo(f"{name} {installed_version(name)}")


def version_asked(flag: bool) -> None:
    """`kt --version`."""
    if flag:
        version()
        raise typer.Exit


def installed_version(name: str) -> str:
    """From the package's metadata: importing torch to ask it takes seconds."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _kernels() -> str:
    try:
        from tandem import _core
    except ImportError as error:
        return f"are missing ({error}); build them: make ext"
    return f"for {', '.join(_core.supported_tiers())} on this CPU"
