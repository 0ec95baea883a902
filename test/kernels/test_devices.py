"""Which kernels a GPU is given: those that run on it, and a word to the user where that is not the fastest."""

import os
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from devices import HOPPER, NEEDS_GPU
from head_calls import run_pytorch
from liger_rl import FusedLinearGRPOLoss, linear_logprobs
from liger_rl import kernels as rooms
from liger_rl.fused_linear import grpo_loss_from_logits
from liger_rl.head import logits_logprobs
from liger_rl.kernels import devices as limits
from liger_rl.kernels import reference
from liger_rl.kernels.devices import Gpu, reason_against_gpu, reason_against_product

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("gpu", "lacking"),
    [
        (Gpu((9, 0), 227 << 10, amd=False, triton=(3, 4)), None),  # H100, H200
        (Gpu((10, 0), 227 << 10, amd=False, triton=(3, 5)), None),  # B200
        (Gpu((10, 3), 227 << 10, amd=False, triton=(3, 10)), None),  # B300
        (Gpu((10, 0), 227 << 10, amd=False, triton=(3, 4)), "Triton 3.5 or later on this GPU, got 3.4"),
        (Gpu((12, 0), 99 << 10, amd=False, triton=(3, 4)), None),
        (Gpu((12, 0), 99 << 10, amd=False, triton=(3, 6)), None),  # RTX 5090
        (Gpu((12, 1), 99 << 10, amd=False, triton=(3, 6)), None),  # DGX Spark
        (Gpu((8, 0), 163 << 10, amd=False, triton=(3, 6)), None),  # A100
        (Gpu((8, 9), 99 << 10, amd=False, triton=(3, 6)), None),
        (Gpu((8, 7), 64 << 10, amd=False, triton=(3, 6)), "99 KiB of shared memory per block, got 64 KiB"),
        (Gpu((7, 5), 64 << 10, amd=False, triton=(3, 6)), "compute capability 8.0 or higher, got 7.5"),
        (Gpu((9, 4), 64 << 10, amd=True, triton=(3, 6)), None),  # MI300
        (Gpu((9, 5), 160 << 10, amd=True, triton=(3, 6)), None),  # MI355
        (Gpu((11, 0), 64 << 10, amd=True, triton=(3, 6)), "gfx942 or gfx950 of AMD's GPUs, got gfx110"),
        (Gpu((9, 0), 227 << 10, amd=False, triton=None), "Triton"),
    ],
)
def test_what_a_gpu_lacks(gpu, lacking, monkeypatch):
    found = reason_against_gpu(gpu)
    assert found is None if lacking is None else lacking in found
    monkeypatch.setitem(limits.GPUS, CUDA, gpu)
    hidden, weight = (OnCuda(torch.zeros(n, 64, dtype=torch.bfloat16)) for n in (512, 900))
    assert reason_against_product(hidden, weight) == found


class OnCuda:
    """What the gate looks at, of a matrix on a GPU that is not there."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix

    def __getattr__(self, name: str) -> object:
        return getattr(self.matrix, name)


@pytest.mark.parametrize("folds", [False, True])
def test_what_a_call_lacks(folds, monkeypatch):
    monkeypatch.setitem(limits.GPUS, CUDA, HOPPER)
    hidden, weight = (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (512, 900))
    one_dtype, aligned = "hidden states and weight in one 16-bit dtype", "rows .* that start at multiples of 16 bytes"
    for other, reason in (
        (hidden, None), (hidden[:511], None if folds else "512 tokens or more"), (hidden[:0], ""),
        (hidden.float(), one_dtype), (hidden.half(), one_dtype),
        (hidden[:, :60], "a hidden size that is a multiple of 8, got 60"), (hidden[:, 8:-8], None),
        (hidden[:, 4:-4], aligned), (hidden.T.contiguous().T, aligned),
    ):  # fmt: skip
        narrow = weight[:, : other.shape[1]].contiguous()
        found = reason_against_product(OnCuda(other), OnCuda(narrow), folds=folds)
        assert found is reason is None or re.search(reason, found), other.shape


def test_views_that_start_between():
    flat = torch.zeros(8 * 64 + 8, dtype=torch.bfloat16)
    for start, fits in ((0, True), (8, True), (4, False), (1, False)):
        view = flat[start : start + 8 * 64].view(8, 64)
        assert limits.is_aligned(view) == fits
    assert not limits.is_aligned(flat[: 8 * 64].view(64, 8).T)
    assert not limits.is_aligned(flat[:480].view(8, 60))


def test_cuda_without_triton(monkeypatch):
    """PyTorch's kernels, and one warning; a bare ModuleNotFoundError helps nobody."""
    properties = SimpleNamespace(major=9, minor=0, shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(limits, "GPUS", {})
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match="Triton cannot be imported .* so liger_rl runs its PyTorch kernels"):
        assert limits.gpu_of(CUDA) == HOPPER._replace(triton=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not limits.runs_triton(CUDA)
    assert rooms.for_device(CUDA) is reference
    hidden, weight = (OnCuda(torch.zeros(n, 64, dtype=torch.bfloat16)) for n in (512, 900))
    assert reason_against_product(hidden, weight) == "Triton"


@NEEDS_GPU
def test_a_step_without_triton(monkeypatch):
    """The same loss and gradients."""
    hidden, weight = torch.randn(2048, 256).cuda().bfloat16(), (torch.randn(8000, 256) / 16).cuda().bfloat16()
    ids, advantages = torch.randint(0, 8000, (2048,)).cuda(), torch.randn(2048).cuda()

    def step():
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = FusedLinearGRPOLoss("gpg")(*leaves, ids, advantages).loss
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves)]

    expected = step()
    run_pytorch(monkeypatch, hidden.device)
    for name in [*sys.modules]:
        if name.startswith("liger_rl.") and name.endswith(("triton", "compiled", "epilogue")):
            monkeypatch.setitem(sys.modules, name, None)  # an import of it raises
    for mine, other in zip(step(), expected, strict=True):
        assert (mine.double() - other.double()).norm() <= 1e-2 * other.double().norm()
    logits, ids = torch.randn(64, 100, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")
    logits_logprobs(logits, ids)
    grpo_loss_from_logits(logits, ids, torch.ones(64, device="cuda"))


@NEEDS_GPU
def test_hidden_states_that_start_between():
    """What is on the GPU is as good as its copy, to the last bit; a weight in between takes other kernels."""
    flat = torch.randn(600 * 64 + 1, device="cuda").bfloat16()
    weight, ids = torch.randn(3000, 64, device="cuda").bfloat16(), torch.arange(600, device="cuda")
    between = flat[1:].view(600, 64)
    assert torch.equal(linear_logprobs(between, weight, ids).logps, linear_logprobs(between.clone(), weight, ids).logps)


def test_no_instruction_of_nvidia_for_amd():
    """AMD's compiler ends the process at one; PyTorch's builds for AMD have a `torch.version.hip`."""
    pytest.importorskip("triton", reason="Triton is not installed")
    code = (
        "import importlib, torch; torch.version.hip = '6.4'; from liger_rl.kernels import softmax_triton as softmax; "
        "print(softmax.PORTABLE.value); torch.version.hip = None; print(importlib.reload(softmax).PORTABLE.value)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
