"""`python -m liger_rl`: versions, devices, and what runs on each and why. Made to be pasted into a bug report."""

import os
import platform
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

import liger_rl
from liger_rl.head.engines.choose import plan_linear_logprobs
from liger_rl.kernels import devices, for_device
from liger_rl.logprobs import linear_logprobs

# Distribution -> what does not work without it, or may fail with a version that is not supported.
NEEDED_BY = {
    "torch": "everything",
    "triton": "Triton kernels (PyTorch's give a GPU the same results, in more time and memory)",
    "transformers": "swap_lm_head and policy_step",
    "peft": "adapters on the head of a swapped model",
    "trl": "patch_trl",
    "liger-kernel": "patch_liger",
    "verl": "patch_verl",
}
SETTINGS = ("LIGER_RL_", "TRITON_")  # prefixes of environment variables that may explain a difference
PLANNED = (8192, 128256, 4096)  # tokens, vocabulary entries, hidden size
CALLS: dict[str, dict[str, Any]] = {
    "plan of {} tokens, {} vocabulary entries, hidden size {}, bfloat16".format(*PLANNED): {},
    'the same with passes="one"': {"passes": "one"},
    "the same with grad_tolerance=0": {"grad_tolerance": 0.0},
}


def report() -> str:
    """Versions, then what runs on each device. Nothing here raises: a part that fails is replaced by its error."""
    lines = [f"liger_rl {liger_rl.__version__}", f"Python {platform.python_version()} on {platform.platform()}"]
    supported = _supported()
    lines += [_version(name, supported.get(name, "")) for name in NEEDED_BY]
    lines += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
        names = [f"{name} {version}" for name, version in built.items() if version]
        lines.append(f"no GPU that PyTorch sees; it is built for {', '.join(names) or 'CPU alone'}")
    for device in [*(torch.device("cuda", index) for index in range(gpus)), torch.device("cpu")]:
        lines += ["", f"{device}: {_said(_hardware, device)}"]
        lines.append(f"  kernels: {_said(_kernels, device)}")
        lines.append(f"  product with a fused epilogue: {_said(_epilogue, device)}")
        lines.append(f"  forward and backward: {_said(_run, device)}")
        lines += [f"  {name}: {_said(_plan, device, options)}" for name, options in CALLS.items()]
    return "\n".join(lines)


def _said(part: Callable[..., str], *arguments: Any) -> str:
    try:
        return part(*arguments)
    except Exception as error:  # what does not work is what a report is for
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _hardware(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    gpu = devices.gpu_of(device)
    capability = "compute capability {}.{}".format(*gpu.capability)
    return (
        f"{torch.cuda.get_device_name(device)}, {capability}, {gpu.shared_bytes >> 10} KiB of shared memory per block"
    )


def _epilogue(device: torch.device) -> str:
    lacks = "a GPU" if device.type == "cpu" else devices.gpu_lacks(devices.gpu_of(device))
    return f"no, needs {lacks}" if lacks else f"yes, the {devices.family_of(device).name} family"


def _kernels(device: torch.device) -> str:
    return for_device(device).__name__


def _run(device: torch.device) -> str:
    """A small batch, in the dtype and with the tokens that a fused epilogue takes, beside PyTorch's float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(devices.MIN_TOKENS, 64, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight = torch.randn(1000, 64, generator=generator).to(device, torch.bfloat16)
    ids = torch.randint(0, 1000, (len(hidden),), generator=generator).to(device)
    logps = linear_logprobs(hidden, weight, ids).logps
    logps.sum().backward()
    exact = torch.log_softmax(hidden.detach().double().cpu() @ weight.double().cpu().T, -1)
    error = (logps.detach().cpu() - exact.gather(-1, ids.cpu()[:, None])[:, 0]).abs().max().item()
    return f"run; log-probabilities are within {error:.0e} nats of float64"


def _plan(device: torch.device, options: dict[str, Any]) -> str:
    plan = plan_linear_logprobs(*PLANNED, device=device, **options)
    return f"{plan.path}, in {'the epilogue' if plan.epilogue else 'float32 tiles'}: {plan.reason}"


def _supported() -> dict[str, str]:
    """Distribution -> the versions that this package declares to support; empty where it runs from bare sources."""
    try:
        requirements = metadata.requires("liger_rl") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for requirement in requirements:
        match = re.match(r"([\w-]+)\s*([<>=][^;]*)", requirement)
        if match:
            found.setdefault(match[1], match[2].strip())  # that of its own extra comes first
    return found


def _version(name: str, supported: str) -> str:
    wanted = f" (supported: {supported})" if supported else ""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed{wanted}: without {NEEDED_BY[name]}"
    if _within(version, supported):
        return f"{name} {version}"
    return f"{name} {version} is not supported{wanted}: may fail: {NEEDED_BY[name]}"


def _within(version: str, supported: str) -> bool:
    """Specifiers >= and < alone, which are all that this package declares; `packaging` need not be installed."""
    found = _numbers(version)
    return all(
        found >= _numbers(bound) if sign == ">=" else found < _numbers(bound)
        for sign, bound in re.findall(r"(>=|<)([\d.]+)", supported)
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


if __name__ == "__main__":
    print(report())
