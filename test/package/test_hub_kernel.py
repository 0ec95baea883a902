"""The hub kernel, built from the sources here and loaded by HuggingFace's `kernels`, without the package itself."""

import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def hub_build():
    spec = importlib.util.spec_from_file_location("hub_build", ROOT / "hub" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernel_is_loaded_and_used(tmp_path):
    for system in ("kernels", "transformers", "liger_kernel"):
        try:  # a folder of tests could be imported as kernels, too
            metadata.version(system)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{system} is not installed, and the kernel's card needs it")
    if tuple(map(int, metadata.version("kernels").split(".")[:2])) < (0, 17):
        pytest.skip("kernels before 0.17 has other names for what is asked of it here")
    hub_build().build(tmp_path / "build" / "hub")
    script = [sys.executable, str(ROOT / "test" / "package" / "use_hub_kernel.py")]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
