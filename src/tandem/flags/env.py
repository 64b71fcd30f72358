"""The only file that reads the environment. Nothing here decides a result: flags do. Which GPUs there are, CUDA's own
variables say.

Variables that tutorials of other engines export (SGLANG_…, FLASHINFER_CUDA_ARCH_LIST, AMX_METHOD, …) are not read, so
they are harmless; one says where files go: SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR. PyTorch reads those of its own.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

TMP = "/tmp"
DEMO = "demo"  # the model that comes with Tandem


def cache_dir() -> Path:
    """Where prepared models are kept: $TANDEM_CACHE_DIR, else $XDG_CACHE_HOME/tandem, else ~/.cache/tandem."""
    chosen = os.environ.get("TANDEM_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else _home() / ".cache") / "tandem"


def _home() -> Path:
    """A container's user may be a number, with neither HOME nor a name."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir())


def lock_dir() -> Path:
    """Folder in which this user's servers tell each other what memory they fill: below /tmp, which a service and a
    shell share, also where TMPDIR says otherwise. XDG_RUNTIME_DIR a service does not have."""
    parent = TMP if os.access(TMP, os.W_OK | os.X_OK) else tempfile.gettempdir()
    return Path(parent, f"tandem-{os.getuid()}")


def recorder_dir() -> Path:
    """Where expert statistics are written unless a flag says so, as in SGLang."""
    chosen = os.environ.get("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR")
    return Path(chosen).expanduser() if chosen else Path(tempfile.gettempdir())


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES; None where it is not set, "" where no GPU is to be used."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def ranks_share_gpus() -> bool:
    """TANDEM_RANKS_SHARE_GPU=1: several ranks may have the same GPU, as tests on a machine with one need it. Each waits
    for the other's turn, so it is slow."""
    return os.environ.get("TANDEM_RANKS_SHARE_GPU") == "1"


def number_gpus_by_slot() -> None:
    """CUDA, once it starts in this process, will number GPUs as nvidia-smi does, unless it was told how."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def allocator_settings() -> str:
    """PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, which PyTorch itself reads; "": neither is set."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def keep_kernels_where_possible() -> None:
    """Triton writes the kernels that it has compiled below HOME. Where it cannot, a start would fail; they then go to a
    folder of this process's own, which ends with it."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    place = Path(os.environ.get("TRITON_CACHE_DIR", "").strip() or Path(home, ".triton", "cache"))
    nearest = next(path for path in (place, *place.parents) if path.exists())
    if place.parts[0] != "~" and os.access(nearest, os.W_OK):  # without HOME Triton would make a folder of that name
        return
    os.environ["TRITON_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="tandem-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def tokenize_on_one_thread() -> None:
    """The tokenizers library would wake a thread for each core, and the engine's workers hold the cores."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def api_key() -> str | None:
    """TANDEM_API_KEY: the server's key where no flag gives one, and what `kt chat` and `kt bench` send."""
    return os.environ.get("TANDEM_API_KEY") or None


def of_a_model() -> dict[str, str]:
    """For the process that serves a model behind a front: the key and the service manager are the front's alone."""
    return {name: value for name, value in os.environ.items() if name not in ("TANDEM_API_KEY", "NOTIFY_SOCKET")}


def service_manager() -> str | None:
    """NOTIFY_SOCKET: where systemd hears from a unit of `Type=notify`; "@" begins an abstract name."""
    return os.environ.get("NOTIFY_SOCKET") or None
