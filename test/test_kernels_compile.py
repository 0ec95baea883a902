"""Triton's compiler takes every kernel, for a GPU that need not be here; the interpreter is less particular."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import liger_rl

ROOT = Path(__file__).parent.parent


def kernels() -> set[str]:
    """Full names of the functions that are launched: those whose names end so, by the house's custom."""
    found = set()
    package = Path(liger_rl.__file__).parent
    for path in package.rglob("*.py"):
        module = ".".join(["liger_rl", *path.relative_to(package).with_suffix("").parts])
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        found |= {f"{module}.{f.name}" for f in functions if f.name.endswith("_kernel")}
    return found


def test_every_kernel_compiles_for_hopper():
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    script = [sys.executable, str(ROOT / "test" / "compile_kernels.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    from liger_rl.kernels.epilogue import gluon_is_known

    unknown = set() if gluon_is_known() else {name for name in kernels() if ".overlapped." in name}
    assert set(done.stdout.split()) == kernels() - unknown
    assert len(kernels()) > 15
