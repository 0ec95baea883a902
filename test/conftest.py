"""Devices and seeds for every test, the process as it was before it, Triton's interpreter where there is no GPU."""

import gc
import os
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from devices import NEEDS_GPU
from quick_interpreter import hasten

# What the imports of tests make stays: to look for garbage in it takes a quarter of their time.
gc.disable()
# Read when Liger's kernels for experts are imported. To tune each takes minutes.
os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"
if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it must be set before any test imports a module of kernels.
    os.environ["TRITON_INTERPRET"] = "1"
    hasten()
    # A seed would wait for a GPU, with a stack of its caller that takes a hundred times as long as the seed of the CPU.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None


def pytest_collection_modifyitems(config, items):
    """Without a GPU no test of one is collected. With fewer than it needs, it is skipped."""
    needed = [max((mark.args[0] for mark in item.iter_markers("gpus")), default=0) for item in items]
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item, gpus in zip(items, needed, strict=True) if gpus])
        items[:] = [item for item, gpus in zip(items, needed, strict=True) if not gpus]
        return
    for item, gpus in zip(items, needed, strict=True):
        if gpus > torch.cuda.device_count():
            item.add_marker(pytest.mark.skip(reason=f"fewer than {gpus} CUDA devices"))


def pytest_collection_finish():
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """Why tests were skipped, a line for each reason: pytest's own `-rs` has one for each place in a file."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skipped tests by reason")
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number:5} {reason}")


@pytest.fixture(autouse=True, scope="module")
def imported():
    """What is there when a module's tests begin stays: no collection of garbage walks through all of torch again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def uncompiled(request):
    """Dynamo counts compilations by code object, and past eight it compiles no more: each test begins with none."""
    if request.node.get_closest_marker("compilation"):
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def isolated():
    """Undoes what a test, or a snippet of a page, leaves in the process: the next test must not depend on the order."""
    environment = dict(os.environ)
    singletons = {name: dict(state) for name, state in _singletons_of_accelerate().items()}
    had_group = dist.is_available() and dist.is_initialized()
    yield
    _unpatch()
    for name, state in _singletons_of_accelerate().items():
        state.clear()
        state.update(singletons.get(name, {}))
    if dist.is_available() and dist.is_initialized() and not had_group:
        dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    if torch.empty(0).device.type != "cpu":
        torch.set_default_device(None)  # after which torch 2.8 fails where it is asked for the default device
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    _restore(environment)


def _unpatch() -> None:
    """The packages that a test may have patched; a module that nobody has loaded has patched nothing."""
    for system in ("trl", "liger", "verl"):
        module = sys.modules.get(f"liger_rl.integrations.{system}")
        if module is not None:
            getattr(module, f"unpatch_{system}")()


def _singletons_of_accelerate() -> dict[str, dict]:
    """The first trainer or Accelerator decides on a device for the whole process, and one of another device raises."""
    module = sys.modules.get("accelerate.state")
    names = ("AcceleratorState", "PartialState", "GradientState") if module is not None else ()
    return {name: getattr(module, name)._shared_state for name in names}


def _restore(environment: dict[str, str]) -> None:
    """Trainers say in variables what accelerate is to read. pytest sets one of its own for each phase."""
    for name in os.environ.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    for name, value in environment.items():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != value:
            os.environ[name] = value
