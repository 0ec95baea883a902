"""Which kernels a GPU runs, and which calls our own product takes. Triton is imported only when a GPU is looked up."""

import logging
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.kernels.limits import LIMITS

logger = logging.getLogger("liger_rl")

# The first NVIDIA GPUs with bfloat16 products and asynchronous copies, the first with the tensor memory accelerator
# (TMA), and the first for which Triton 3.4 compiles no product of ours: it needs too much shared memory.
PORTABLE_CAPABILITY, TMA_CAPABILITY, BLACKWELL = (8, 0), (9, 0), (10, 0)
BLACKWELL_TRITON = (3, 5)
AMD_CAPABILITIES = ((9, 4), (9, 5))  # gfx942 and gfx950
SHARED_BYTES = 227 << 10  # shared memory of a TMA program
AMD_SHARED_BYTES = 64 << 10  # used for AMD, because PyTorch's builds for AMD do not report it
# From this version of Triton on, the largest folds spill more registers, so `family_of_gpu` takes more warps. Bytes
# that a thread spills with 8 and with 16 warps:
#   10.0: 1336 and 256 with Triton 3.9, 384 and 432 with 3.6
#   gfx950: 1744 and 920 with Triton 3.8, the only version that gets more warps; 284 with 3.9
SPILLING_TRITON = (3, 8)
WARPS = 8  # of a program, by default
DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT_BYTES = 16
NO_CONTEXT = nullcontext()
# For bug reports: "tiles" runs float32 tiles of logits in place of our own products.
FORCED_KERNELS = os.environ.get("LIGER_RL_KERNELS") or None


class Family(NamedTuple):
    """How our own products read memory: with TMA or with pointers, in which steps, and how many steps ahead."""

    tma: bool
    step: int  # length of a step of a product's sum: columns of hidden states and weight, or rows of either
    stages: int  # steps that are loaded or being loaded
    storing_stages: int  # `stages` of a kernel that stores a tile through shared memory
    slices: int  # of the columns of a tile of logits, folded in turn; before Hopper a product leaves fewer registers
    shared_bytes: int  # largest shared memory of a program
    fold_warps: int = WARPS  # warps of a program of the fold
    halves: bool = True  # a fold splits its tile in registers; 10.x would need more shared memory than it has

    @property
    def name(self) -> str:
        return "tma" if self.tma else "portable"


TMA = Family(tma=True, step=64, stages=4, storing_stages=3, slices=1, shared_bytes=SHARED_BYTES)
# In descending order of shared memory: a GPU with Hopper's, A100, GPUs with about half of Hopper's. Code for 8.0 ran
# faster on an H200 with two slices than with one or four.
PORTABLE = (
    Family(tma=False, step=64, stages=4, storing_stages=3, slices=1, shared_bytes=SHARED_BYTES),
    Family(tma=False, step=64, stages=4, storing_stages=3, slices=2, shared_bytes=163 << 10),
    Family(tma=False, step=32, stages=4, storing_stages=3, slices=2, shared_bytes=99 << 10),
)
PORTABLE_AMD = Family(tma=False, step=32, stages=2, storing_stages=2, slices=1, shared_bytes=AMD_SHARED_BYTES)


class Gpu(NamedTuple):
    """The properties of a GPU that decide which kernels it runs."""

    capability: tuple[int, int]
    shared_bytes: int  # largest shared memory of a program
    amd: bool  # PyTorch calls AMD's GPUs cuda, and gives gfx942 as capability (9, 4)
    triton: tuple[int, int] | None  # the installed version; None without Triton

    @property
    def name(self) -> str:
        return ("gfx{}{}" if self.amd else "compute capability {}.{}").format(*self.capability)


# The GPU of each device that was looked up; None for a CPU. Tests set it: on CPU to a GPU whose kernels Triton's
# interpreter then runs, on a GPU to one with other kernels or without Triton.
GPUS: dict[torch.device, Gpu | None] = {}


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU of a CUDA device, else None."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in GPUS:
        GPUS[device] = _look_up(device)
    return GPUS[device]


def _look_up(device: torch.device) -> Gpu | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
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


def runs_triton(device: torch.device) -> bool:
    """Whether the kernels of `device` are Triton's. On CPU, and on CUDA without Triton, they are PyTorch's."""
    gpu = GPUS[device] if device in GPUS else gpu_of(device)
    return gpu is not None and gpu.triton is not None


def launch_context(device: torch.device) -> AbstractContextManager:
    """The context of a launch. Triton launches on the current device, which may differ from the tensors' device."""
    # Entering torch.cuda.device takes more host time than this comparison.
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return NO_CONTEXT
    return torch.cuda.device(device.index)


def reason_against_device(device: torch.device) -> str | None:
    """The first thing that our own product needs and this device lacks; None if it lacks nothing."""
    gpu = GPUS[device] if device in GPUS else gpu_of(device)
    return "a GPU" if gpu is None else reason_against_gpu(gpu)


def reason_against_gpu(gpu: Gpu) -> str | None:
    """The first thing that our own product needs and this GPU lacks; None if it lacks nothing."""
    if FORCED_KERNELS not in (None, "tiles"):
        raise ValueError(f"LIGER_RL_KERNELS must be tiles, or not set; got {FORCED_KERNELS!r}")
    if FORCED_KERNELS is not None:
        return "LIGER_RL_KERNELS not to be tiles"
    if gpu.triton is None:
        return "Triton"
    if gpu.amd:
        known = gpu.capability in AMD_CAPABILITIES
        return None if known else f"gfx942 or gfx950 of AMD's GPUs, got {gpu.name}"
    if gpu.capability < PORTABLE_CAPABILITY:
        return "compute capability {}.{} or higher, got {}.{}".format(*PORTABLE_CAPABILITY, *gpu.capability)
    if gpu.shared_bytes < PORTABLE[-1].shared_bytes:
        return f"{PORTABLE[-1].shared_bytes >> 10} KiB of shared memory per block, got {gpu.shared_bytes >> 10} KiB"
    if gpu.capability[0] == BLACKWELL[0] and gpu.triton < BLACKWELL_TRITON:
        return "Triton {}.{} or later on this GPU, got {}.{}".format(*BLACKWELL_TRITON, *gpu.triton)
    return None


def family_of(device: torch.device) -> Family:
    """The family of a device whose `reason_against_device` is None."""
    gpu = gpu_of(device)
    assert gpu is not None
    return family_of_gpu(gpu)


@cache
def family_of_gpu(gpu: Gpu) -> Family:
    """The family of a GPU whose `reason_against_gpu` is None: TMA if it has that. Else the first PORTABLE that fits."""
    assert gpu.triton is not None
    if gpu.amd:
        spills = gpu.capability == AMD_CAPABILITIES[1] and gpu.triton == SPILLING_TRITON
        return PORTABLE_AMD._replace(fold_warps=2 * WARPS) if spills else PORTABLE_AMD
    compiled = gpu.capability < BLACKWELL or gpu.triton >= BLACKWELL_TRITON
    if gpu.capability < TMA_CAPABILITY or gpu.shared_bytes < SHARED_BYTES or not compiled:
        return next(family for family in PORTABLE if family.shared_bytes <= gpu.shared_bytes)
    blackwell = gpu.capability[0] == BLACKWELL[0]
    spills = blackwell and gpu.triton >= SPILLING_TRITON
    return TMA._replace(fold_warps=2 * WARPS if spills else WARPS, halves=not blackwell)


def reason_against_product(hidden: Tensor, weight: Tensor, *, folds: bool = False) -> str | None:
    """The first thing that our own product hidden (N, H) @ weight (V, H).T needs and lacks; None if it lacks nothing.

    A fold (`folds`) takes any N but 0.
    """
    reason, dtype, (tokens, hidden_size) = reason_against_device(weight.device), hidden.dtype, hidden.shape
    if reason is not None:
        return reason
    if dtype not in DTYPES or weight.dtype != dtype:
        return "hidden states and weight in one 16-bit dtype"
    if hidden_size * dtype.itemsize % ALIGNMENT_BYTES != 0:
        return f"a hidden size that is a multiple of {ALIGNMENT_BYTES // dtype.itemsize}, got {hidden_size}"
    if not (is_aligned(weight) and is_aligned(hidden)):
        return f"rows of hidden states and weight that start at multiples of {ALIGNMENT_BYTES} bytes"
    if tokens < (1 if folds else LIMITS.product_tokens):
        return "a token" if folds else f"{LIMITS.product_tokens} tokens or more"
    return None


def log_way(what: str, device: torch.device, reason: str | None) -> None:
    """Log, once, on what `what` of a head runs: on our own product with an epilogue, or for a `reason` on tiles."""
    if logger.isEnabledFor(logging.INFO):
        _log_once(what, device, reason)


@cache
def _log_once(what: str, device: torch.device, reason: str | None) -> None:
    if reason is None:
        logger.info("%s of a head on %s: a product with a fused epilogue (%s)", what, device, family_of(device).name)
    else:
        logger.info("%s of a head on %s: float32 tiles of logits; a fused epilogue needs %s", what, device, reason)


def empty_rows(n: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized (n, columns) matrix whose rows start at multiples of 16 bytes."""
    multiple = ALIGNMENT_BYTES // dtype.itemsize
    width = -(-columns // multiple) * multiple
    rows = torch.empty(n, width, dtype=dtype, device=device)
    return rows if width == columns else rows[:, :columns]


def align_rows(rows: Tensor) -> Tensor:
    """`rows`, which are contiguous, or on a GPU a copy if they do not start at a multiple of 16 bytes."""
    return rows.clone() if rows.is_cuda and rows.data_ptr() % ALIGNMENT_BYTES != 0 else rows


def is_aligned(matrix: Tensor) -> bool:
    """Whether rows are contiguous and start at multiples of 16 bytes, as TMA needs."""
    if matrix.stride(1) != 1 or matrix.stride(0) * matrix.element_size() % ALIGNMENT_BYTES != 0:
        return False
    return matrix.data_ptr() % ALIGNMENT_BYTES == 0
