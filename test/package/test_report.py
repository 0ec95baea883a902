"""`python -m liger_rl` says what works and what does not, and never fails itself."""

import subprocess
import sys
from importlib import metadata

import pytest
import torch

from liger_rl import __main__ as report
from liger_rl.kernels import devices

WITHOUT_TRITON = """
import runpy, sys
from importlib import metadata

versions = {"transformers": "4.40.1", "torch": "2.5.1+cu121"}
real = metadata.version

def version(name):
    if name == "triton":
        raise metadata.PackageNotFoundError(name)
    return versions.get(name) or real(name)

metadata.version = version
metadata.requires = lambda name: ["torch>=2.8", "transformers>=4.57; extra == 'hf'"]
sys.modules["triton"] = None
runpy.run_module("liger_rl", run_name="__main__")
"""
AMPERE = devices.Gpu((8, 0), 163 << 10, amd=False, triton=(3, 6))


@pytest.fixture
def declared(monkeypatch):
    """What an installed package declares; these sources need not be installed."""
    monkeypatch.setattr(
        metadata,
        "requires",
        lambda name: ["torch>=2.8", "liger_rl[hf]; extra == 'trl'", "trl<1.17,>=1.15; extra == 'trl'"],
    )


def test_without_triton_and_with_old_versions():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    (triton,) = [line for line in lines if line.startswith("triton ")]
    assert triton.startswith("triton is not installed")
    (old,) = [line for line in lines if line.startswith("torch ")]
    assert old == "torch 2.5.1+cu121 is not supported (supported: >=2.8): may fail: everything"
    (old,) = [line for line in lines if line.startswith("transformers ")]
    assert old.endswith("may fail: swap_lm_head and policy_step")
    assert any(line.startswith("  forward and backward: run; ") for line in lines)


def test_gpus_and_what_they_lack(monkeypatch):
    """Devices that are not here: what is asked of them fails, is said, and stops nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(devices, "_KNOWN", {0: devices.HOPPER, 1: AMPERE, 2: AMPERE._replace(triton=None)})
    parts = dict(part.split(": ", 1) for part in report.report().split("\n\n")[1:])
    assert list(parts) == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    assert parts["cuda:0"].startswith("GPU 0, compute capability 9.0, 227 KiB")
    assert "product with a fused epilogue: yes, the tma family" in parts["cuda:0"]
    assert "bfloat16: sparse, in the epilogue" in parts["cuda:0"]
    assert "grad_tolerance=0: two passes, in the epilogue" in parts["cuda:0"]
    assert "product with a fused epilogue: yes, the portable family" in parts["cuda:1"]
    assert "kernels: liger_rl.kernels.compiled" in parts["cuda:1"]
    assert "product with a fused epilogue: no, needs Triton" in parts["cuda:2"]
    assert "kernels: liger_rl.kernels.plain" in parts["cuda:2"]
    if torch.version.cuda is None:
        assert "forward and backward: AssertionError: " in parts["cuda:0"]
    assert "forward and backward: run; " in parts["cpu"]


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("torch", "2.8.0", "torch 2.8.0"),
        ("torch", "2.10.0a0+git1", "torch 2.10.0a0+git1"),
        ("torch", "2.7.1", "torch 2.7.1 is not supported (supported: >=2.8): may fail: everything"),
        ("trl", "1.17.0", "trl 1.17.0 is not supported (supported: <1.17,>=1.15): may fail: patch_trl"),
        ("trl", None, "trl is not installed (supported: <1.17,>=1.15): without patch_trl"),
        ("verl", "0.1", "verl 0.1"),  # nothing is declared for it here
    ],
)
def test_versions(declared, monkeypatch, name, version, expected):
    def found(asked: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(metadata, "version", found)
    assert report._version(name, report._supported().get(name, "")) == expected


def test_bare_sources_declare_nothing(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert report._supported() == {}
