"""How many of the package's frames stand between the call of a user, or autograd, and the launch of a kernel."""

import sys
from pathlib import Path

import pytest
import torch

import liger_rl
from head_calls import problem, run_triton
from liger_rl import FusedLinearGRPOLoss, linear_logprobs

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")

PACKAGE = str(Path(liger_rl.__file__).parent)
# linear_logprobs or the loss, log_probs, linear_values, the engine, a sweep over tiles, the launch.
# Backward: the guard against second derivatives, the Function, token_gradients, the engine, its tiles, the launch.
MOST_FRAMES = 6


@pytest.fixture
def frames(monkeypatch):
    """Kernel -> the package's frames above each of its launches, outermost first."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    found: dict[str, list[list[str]]] = {}
    launch = interpreter.GridExecutor.__call__

    def counted(self, *args, **kwargs):
        stack, frame = [], sys._getframe(1)
        while frame is not None:
            code, frame = frame.f_code, frame.f_back
            # A launch's own frame takes the place of Triton's.
            if code.co_filename.startswith(PACKAGE) and Path(code.co_filename).name != "launches.py":
                stack.insert(0, f"{Path(code.co_filename).name}:{code.co_name}")
        found.setdefault(self.fn.__name__, []).append(stack)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    return found


@pytest.mark.parametrize(("epilogue", "grad_tolerance"), [(False, 0.0), (True, 0.0), (True, 0.3)])
def test_log_probabilities(frames, epilogue, grad_tolerance, monkeypatch):
    run_triton(monkeypatch, epilogue=epilogue)
    x = problem((20,), 16, 300, torch.float16).leaves()
    found = linear_logprobs(x.hidden, x.weight, x.targets, entropy=True, grad_tolerance=grad_tolerance)
    (found.logps.sum() + found.entropy.sum()).backward()
    check(
        frames, "_gemm_fold_kernel" if epilogue else "_fold_kernel", "_left_out_kernel" if grad_tolerance else "_grad"
    )


@pytest.mark.parametrize("passes", ["one", "two"])
def test_losses(frames, passes, monkeypatch):
    run_triton(monkeypatch)
    x = problem((2, 5), 16, 300).leaves()
    loss = FusedLinearGRPOLoss("dapo", passes=passes)
    loss(x.hidden, x.weight, x.targets, torch.randn(2)).loss.backward()
    check(frames, "_fold_kernel", "_grad_kernel" if passes == "two" else "_grad_kept_kernel")


def check(frames, *kernels):
    assert all(any(name in kernel for kernel in frames) for name in kernels)
    deepest = {kernel: max(stacks, key=len) for kernel, stacks in frames.items()}
    assert max(map(len, deepest.values())) <= MOST_FRAMES, deepest
    assert min(map(len, deepest.values())) > 2  # or nothing was walked
