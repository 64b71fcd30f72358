"""Tandem's experts under the name that SGLang imports. Refuses to sit beside the original, which has the same files."""

from types import SimpleNamespace

from tandem import __version__
from tandem.backends.kt.installed import check_alone
from tandem.backends.kt.layer import KtLayer as KTMoEWrapper
from tandem.backends.kt.layer import generate_gpu_experts_masks

check_alone()

kt_kernel_ext = SimpleNamespace()  # SGLang looks here for what it need not have
AMXSFTMoEWrapper = None  # nothing is trained

__all__ = ["AMXSFTMoEWrapper", "KTMoEWrapper", "__version__", "generate_gpu_experts_masks", "kt_kernel_ext"]
