"""The built distributions: the wheel alone is the package, wherever it is installed."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import liger_rl

ROOT = Path(__file__).resolve().parents[2]
USE = """
import runpy
import sys
from importlib import metadata
from pathlib import Path

target, readme = map(Path, sys.argv[1:])
import liger_rl

assert Path(liger_rl.__file__).is_relative_to(target), liger_rl.__file__
assert metadata.version("liger_rl") == liger_rl.__version__
exec(compile(readme.read_text(encoding="utf-8"), "README.md", "exec"))
assert model.lm_head.weight.grad is not None
runpy.run_module("liger_rl", run_name="__main__")
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=250, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_wheel_is_the_package(tmp_path):
    pytest.importorskip("build", reason="it makes the distributions")
    pytest.importorskip("transformers", reason="the snippet of the README needs it")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), cwd=ROOT)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert f"-{liger_rl.__version__}-py3-none-any" in wheel.name
    with tarfile.open(source) as archive:
        top = {name.split("/", 2)[1] for name in archive.getnames() if "/" in name}
    assert top >= {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "liger_rl", "pyproject.toml"}
    assert "test" not in top

    site = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
        cwd=tmp_path,
    )
    sources = {path.relative_to(ROOT) for path in (ROOT / "liger_rl").rglob("*") if path.suffix in (".py", ".typed")}
    installed = {path.relative_to(site) for path in (site / "liger_rl").rglob("*") if path.suffix in (".py", ".typed")}
    assert installed == sources
    assert Path("liger_rl/py.typed") in installed

    (snippet,) = re.findall(r"```python\n([^`]*swap_lm_head[^`]*)```", (ROOT / "README.md").read_text(encoding="utf-8"))
    (tmp_path / "snippet.py").write_text(snippet)
    # Without `site` no .pth file is read, which is what an editable installation of the sources here is.
    others = [path for path in sys.path if path.endswith("site-packages")]
    arguments = ("-S", "-c", USE, str(site), str(tmp_path / "snippet.py"))
    report = run(sys.executable, *arguments, cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(site), *others]))
    assert report.startswith(f"liger_rl {liger_rl.__version__}\nPython ")
