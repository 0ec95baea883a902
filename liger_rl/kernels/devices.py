"""Which kernels a GPU runs, where the product of our own applies, and the memory it takes beside its results.

Every choice between kernels asks here, and so does the plan. Nothing of Triton is imported before a GPU is asked about.
"""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels.statistics import BLOCK_TOKENS

CAPABILITY = (9, 0)  # of the first GPUs with the tensor memory accelerator
SHARED_BYTES = 227 << 10  # that a program of theirs takes
PORTABLE_CAPABILITY = (8, 0)  # of the first GPUs with products of bfloat16, and with copies beside them
AMD_CAPABILITIES = ((9, 4), (9, 5))  # gfx942 and gfx950
AMD_SHARED_BYTES = 64 << 10  # PyTorch's builds for AMD do not say it
# Triton's for capability 10.0 on. For products of 10.x, 3.4 asks for too much shared memory with pointers as well.
BLACKWELL, BLACKWELL_TRITON = (10, 0), (3, 5)
# From this version of Triton on, the folds that keep the most in registers need more of them than there are. Bytes that
# a thread spills, before and after what `family_of_gpu` does about it: on 10.0 with Triton 3.9 1336 and 256, where 3.6
# spills 384 and 432; with pointers on 9.0 1808 and 176, where 3.6 spills 1224. On gfx950 it is this version alone: 1744
# and 920, where 3.9 spills 284.
SPILLING_TRITON = (3, 8)
WARPS = 8  # of a program
DTYPES = (torch.bfloat16, torch.float16)
MIN_TOKENS = 4 * BLOCK_TOKENS  # under it too few tiles share a read of the weight
STATISTICS_BYTES = 48 << 20  # of the vocabulary tiles' statistics, whatever N and V are
ALIGNMENT_BYTES = 16
HERE = nullcontext()


FORCIBLE = ("tma", "portable", "tiles")
# For reports of bugs and for measurements: the family that runs, where this GPU can, in place of the fastest.
FORCED = os.environ.get("LIGER_RL_KERNELS") or None


class Family(NamedTuple):
    """How the products of our own read memory: with TMA or with pointers, and how much of it ahead."""

    tma: bool
    step: int  # of a product's sum: columns of hidden states and of the weight, or rows of either
    stages: int  # steps that are loaded or on their way
    storing_stages: int  # where there is a tile in shared memory beside them
    parts: int  # of a tile of logits, one after the other: products before Hopper's leave less room in registers
    shared_bytes: int  # that a program takes, at most
    fold_warps: int = WARPS  # of a program of the fold

    @property
    def name(self) -> str:
        return "tma" if self.tma else "portable"


TMA = Family(tma=True, step=64, stages=4, storing_stages=3, parts=1, shared_bytes=SHARED_BYTES)
# From the one that needs most shared memory: Hopper's, where it is asked for; A100's; and of what has half of that. Of
# code for 8.0 on an H200, two parts were the fastest of one, two and four.
PORTABLE = (
    Family(tma=False, step=64, stages=4, storing_stages=3, parts=1, shared_bytes=SHARED_BYTES),
    Family(tma=False, step=64, stages=4, storing_stages=3, parts=2, shared_bytes=163 << 10),
    Family(tma=False, step=32, stages=4, storing_stages=3, parts=2, shared_bytes=99 << 10),
)
PORTABLE_AMD = Family(tma=False, step=32, stages=2, storing_stages=2, parts=1, shared_bytes=AMD_SHARED_BYTES)


class Gpu(NamedTuple):
    """What decides which kernels a GPU runs."""

    capability: tuple[int, int]
    shared_bytes: int  # of one program, at most
    amd: bool  # PyTorch calls these cuda, too, and their architecture a compute capability
    triton: tuple[int, int] | None  # the version that is installed


HOPPER = Gpu(CAPABILITY, SHARED_BYTES, amd=False, triton=BLACKWELL_TRITON)


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a CUDA device; Hopper with all it needs on a machine without one, whose calls can still be planned."""
    index = device.index
    if index is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    gpu = _KNOWN.get(index)
    if gpu is None:
        gpu = _KNOWN[index] = _look_up(index)
    return gpu


# No functools.cache, of which torch.compile would warn where it traces a plan.
_KNOWN: dict[int | None, Gpu] = {}


def _look_up(index: int | None) -> Gpu:
    if not torch.cuda.is_available():
        return HOPPER
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        (properties.major, properties.minor),
        getattr(properties, "shared_memory_per_block_optin", AMD_SHARED_BYTES),
        amd=torch.version.hip is not None,
        triton=_installed_triton(),
    )


def _installed_triton() -> tuple[int, int] | None:
    try:
        import triton
    except ImportError as error:
        warnings.warn(
            f"Triton cannot be imported ({error}), so liger_rl runs its PyTorch kernels on the GPU: the same results, "
            "in more time and memory. Install triton, on Windows triton-windows.",
            stacklevel=2,
        )
        return None
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def compiles(device: torch.device) -> bool:
    """Whether the kernels of `device` are Triton's; elsewhere, and on CUDA without Triton, they are PyTorch's."""
    return device.type == "cuda" and gpu_of(device).triton is not None


def on(device: torch.device) -> AbstractContextManager:
    """The context of a launch: Triton launches on the current device, which need not be the tensors'."""
    # Switching to the device that is current takes the host longer than to ask for it.
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device.index)


def tma_lacks(gpu: Gpu) -> str | None:
    """What the product of our own with TMA needs and this GPU does not have; None where nothing is missing."""
    if gpu.triton is None:
        return "Triton"
    if gpu.amd:
        return "an NVIDIA GPU"
    if gpu.capability < CAPABILITY:
        return "compute capability {}.{} or higher, got {}.{}".format(*CAPABILITY, *gpu.capability)
    if gpu.shared_bytes < SHARED_BYTES:
        return f"{SHARED_BYTES >> 10} KiB of shared memory per block, got {gpu.shared_bytes >> 10} KiB"
    if gpu.capability >= BLACKWELL and gpu.triton < BLACKWELL_TRITON:
        return _lacks_triton(gpu)
    return None


def portable_lacks(gpu: Gpu) -> str | None:
    """The same with pointers."""
    if gpu.triton is None:
        return "Triton"
    if gpu.amd:
        if gpu.capability in AMD_CAPABILITIES:
            return None
        return "gfx942 or gfx950 of AMD's GPUs, got gfx{}{}".format(*gpu.capability)
    if gpu.capability < PORTABLE_CAPABILITY:
        return "compute capability {}.{} or higher, got {}.{}".format(*PORTABLE_CAPABILITY, *gpu.capability)
    if gpu.capability[0] == BLACKWELL[0] and gpu.triton < BLACKWELL_TRITON:
        return _lacks_triton(gpu)
    least = PORTABLE[-1].shared_bytes
    if gpu.shared_bytes < least:
        return f"{least >> 10} KiB of shared memory per block, got {gpu.shared_bytes >> 10} KiB"
    return None


def _lacks_triton(gpu: Gpu) -> str:
    assert gpu.triton is not None
    return "Triton {}.{} or later on this GPU, got {}.{}".format(*BLACKWELL_TRITON, *gpu.triton)


def device_lacks(device: torch.device) -> str | None:
    """What the product of our own needs and this device does not have; None where nothing is missing."""
    return gpu_lacks(gpu_of(device)) if device.type == "cuda" else "a GPU"


def gpu_lacks(gpu: Gpu) -> str | None:
    """What the product of our own needs and this GPU does not have; None where nothing is missing.

    Raises:
        ValueError: LIGER_RL_KERNELS names no family, or one that this GPU cannot run.
    """
    if FORCED is None:
        return portable_lacks(gpu)
    if FORCED not in FORCIBLE:
        raise ValueError(f"LIGER_RL_KERNELS must be one of {', '.join(FORCIBLE)}; got {FORCED!r}")
    if FORCED == "tiles":
        return "LIGER_RL_KERNELS not to be tiles"
    lacks = (tma_lacks if FORCED == "tma" else portable_lacks)(gpu)
    if lacks is not None:
        raise ValueError(f"LIGER_RL_KERNELS={FORCED} needs {lacks}; this GPU is {gpu}")
    return None


def family_of(device: torch.device) -> Family:
    """That of a device which `gpu_lacks` nothing; the tests' own on CPU, in Triton's interpreter."""
    return family_of_gpu(gpu_of(device))


def family_of_gpu(gpu: Gpu) -> Family:
    """TMA where a GPU has it; with pointers the first that its shared memory has room for."""
    blackwell = gpu.capability[0] == BLACKWELL[0] and not gpu.amd
    if FORCED != "portable" and tma_lacks(gpu) is None:
        family = TMA
    elif gpu.amd:
        family = PORTABLE_AMD
    elif blackwell:
        # What it multiplies and what it loads share its memory, and halves of a tile lie on different threads.
        family = PORTABLE[-1]._replace(parts=1)
    else:
        family = next((family for family in PORTABLE if family.shared_bytes <= gpu.shared_bytes), PORTABLE[-1])
    if gpu.triton is None or gpu.triton < SPILLING_TRITON:
        return family
    if blackwell or (
        family is PORTABLE_AMD and gpu.capability == AMD_CAPABILITIES[1] and gpu.triton == SPILLING_TRITON
    ):
        return family._replace(fold_warps=2 * WARPS)
    return family._replace(parts=2) if family == PORTABLE[0] else family


def call_lacks(tokens: int, hidden_size: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> str | None:
    """What (tokens, hidden_size) @ (V, hidden_size).T would need for that product; None where nothing is missing."""
    if dtype not in DTYPES or weight_dtype != dtype:
        return "hidden states and weight in one 16-bit dtype"
    if hidden_size * dtype.itemsize % ALIGNMENT_BYTES != 0:
        return f"a hidden size that is a multiple of {ALIGNMENT_BYTES // dtype.itemsize}, got {hidden_size}"
    if tokens < MIN_TOKENS:
        return f"{MIN_TOKENS} tokens or more, got {tokens}"
    return None


def applies(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the product of our own takes hidden (N, H) @ weight (V, H).T."""
    tokens, hidden_size = hidden.shape
    return applies_to(tokens, hidden_size, hidden.dtype, weight) and aligned(hidden)


def applies_to(tokens: int, hidden_size: int, dtype: torch.dtype, weight: Tensor) -> bool:
    """The same of aligned rows that are not there yet."""
    if not weight.is_cuda or gpu_lacks(gpu_of(weight.device)) is not None:
        return False
    return call_lacks(tokens, hidden_size, dtype, weight.dtype) is None and aligned(weight)


def pairs_apply_to(tokens: int, hidden_size: int, dtype: torch.dtype, weight: Tensor) -> bool:
    """The same of a product whose epilogue reads another head's logits; a weight in another dtype is copied for it."""
    if weight.dtype == dtype:
        return applies_to(tokens, hidden_size, dtype, weight) and runs_pairs(gpu_of(weight.device))
    if not weight.is_cuda or gpu_lacks(gpu_of(weight.device)) is not None:
        return False
    return call_lacks(tokens, hidden_size, dtype, dtype) is None and runs_pairs(gpu_of(weight.device))


def runs_pairs(gpu: Gpu) -> bool:
    """Whether a GPU has the registers for such an epilogue, which 10.x and AMD's lack.

    On 10.0 the fold would spill 3168 bytes a thread, on 8.0, 9.0 and 12.0 at most 800.
    """
    return not gpu.amd and gpu.capability[0] != BLACKWELL[0]


def realigned(rows: Tensor) -> Tensor:
    """Contiguous rows as the product of our own can read them: a copy of those of a view that starts elsewhere."""
    return rows.clone() if rows.is_cuda and rows.data_ptr() % ALIGNMENT_BYTES != 0 else rows


def aligned(matrix: Tensor) -> bool:
    """Whether rows are contiguous and start at multiples of 16 bytes, as the tensor memory accelerator needs."""
    row = 2 * matrix.stride(0)  # bytes of 16-bit numbers; rows of float32 start at multiples of as many
    if matrix.stride(1) != 1 or row % ALIGNMENT_BYTES != 0:
        return False
    # While torch.compile traces, tensors have no address: then they are taken to be tensors of their own.
    return torch.compiler.is_compiling() or matrix.data_ptr() % ALIGNMENT_BYTES == 0
