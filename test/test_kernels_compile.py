"""Triton's compiler takes every kernel, for a GPU that need not be here; the interpreter is less particular."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import liger_rl
from liger_rl.kernels.devices import BLACKWELL_TRITON

ROOT = Path(__file__).parent.parent


def kernels() -> set[str]:
    """Full names of the functions that are launched. By the house's custom they are `_NAME_kernel`."""
    found = set()
    package = Path(liger_rl.__file__).parent
    for path in package.rglob("*.py"):
        module = ".".join(["liger_rl", *path.relative_to(package).with_suffix("").parts])
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        found |= {f"{module}.{f.name}" for f in functions if f.name.startswith("_") and f.name.endswith("_kernel")}
    return found


# Sm86 is left to the script by itself: its shared memory and what Triton makes of it are sm89's.
GPUS = ("sm90", "sm80", "gfx942", "sm100", "sm89", "sm120", "gfx950")


@pytest.mark.compilation
@pytest.mark.timeout(900)  # two minutes on an idle core
@pytest.mark.parametrize("targets", GPUS)
def test_kernels_compile_for(targets):
    """Those that the GPU's limits let it run, each within its shared memory; the script fails where one is not."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if targets == "sm100" and tuple(int(part) for part in triton.__version__.split(".")[:2]) < BLACKWELL_TRITON:
        pytest.skip("kernels/devices.py keeps the products of our own from this target with an older Triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    script = [sys.executable, str(ROOT / "test" / "compile_kernels.py"), *targets.split()]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=880)
    if targets.startswith("gfx") and "ld.lld not found" in done.stderr:
        pytest.skip("this Triton needs ROCm's linker")
    assert done.returncode == 0, done.stderr[-3000:]
    everywhere = kernels()
    expected = dict.fromkeys(targets.split(), everywhere)
    found = {target: set() for target in expected}
    for line in done.stdout.splitlines():
        target, name = line.split()
        found[target].add(name)
    assert found == expected
    assert "liger_rl.kernels.epilogue._product_kernel" in everywhere
