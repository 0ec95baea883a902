"""The built distributions: the wheel alone is the package, wherever it is installed."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import liger_rl

ROOT = Path(__file__).resolve().parents[2]
USE = """
import sys
from importlib import metadata
from pathlib import Path

target, readme = map(Path, sys.argv[1:])
import liger_rl

assert Path(liger_rl.__file__).is_relative_to(target), liger_rl.__file__
assert metadata.version("liger_rl") == liger_rl.__version__
exec(compile(readme.read_text(encoding="utf-8"), "README.md", "exec"))
assert model.lm_head.weight.grad is not None
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=250, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


PUBLISHED = {"LIGER_RL_REPOSITORY": "https://host.example/owner/name"}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """-> (the wheel, the source distribution that it was built from), as a publisher builds them"""
    pytest.importorskip("build", reason="build is not installed")
    folder = tmp_path_factory.mktemp("distributions")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), cwd=ROOT, **PUBLISHED)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def test_wheel_is_the_package(distributions, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    wheel, source = distributions
    assert f"-{liger_rl.__version__}-py3-none-any" in wheel.name
    with tarfile.open(source) as archive:
        top = {name.split("/", 2)[1] for name in archive.getnames() if "/" in name}
    assert top >= {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "liger_rl", "pyproject.toml", "setup.py"}
    assert "test" not in top

    site = tmp_path / "site"
    install = ("-m", "pip", "install", "--no-deps", "--no-index", "--target")
    run(sys.executable, *install, str(site), str(wheel), cwd=tmp_path)
    sources = {path.relative_to(ROOT) for path in (ROOT / "liger_rl").rglob("*") if path.suffix in (".py", ".typed")}
    installed = {path.relative_to(site) for path in (site / "liger_rl").rglob("*") if path.suffix in (".py", ".typed")}
    assert installed == sources
    assert Path("liger_rl/py.typed") in installed

    (snippet,) = re.findall(r"```python\n([^`]*swap_lm_head[^`]*)```", (ROOT / "README.md").read_text(encoding="utf-8"))
    (tmp_path / "snippet.py").write_text(snippet)
    # Without `site` no .pth file is read, which is what an editable installation of the sources here is.
    others = [path for path in sys.path if path.endswith("site-packages")]
    arguments = ("-S", "-c", USE, str(site), str(tmp_path / "snippet.py"))
    run(sys.executable, *arguments, cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(site), *others]))


def test_links_of_the_published_readme_lead_to_the_repository(distributions):
    with zipfile.ZipFile(distributions[0]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    assert "Project-URL: Repository, https://host.example/owner/name" in metadata
    links = re.findall(r"(!?)\[[^\]]*\]\((https:[^)]+|[^:)#]+)\)", metadata)
    assert {picture for picture, _ in links} == {"!", ""}
    for picture, link in links:
        assert link.startswith(f"https://host.example/owner/name/{'raw' if picture else 'blob'}/HEAD/"), link


def test_setup_py_builds_the_same_wheel(distributions, tmp_path):
    """From the source distribution, which must hold what setup.py needs. The checkout stays as it is."""
    wheel, source = distributions
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / source.name.removesuffix(".tar.gz")
    run(sys.executable, "setup.py", "--quiet", "bdist_wheel", cwd=folder, **PUBLISHED)
    (other,) = (folder / "dist").glob("*.whl")
    assert other.name == wheel.name
    assert contents(other) == contents(wheel)


def contents(wheel: Path) -> dict[str, str]:
    """Each file and its checksum, which RECORD holds; the metadata are files too."""
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        lines = archive.read(record).decode().splitlines()
        found = dict(line.split(",", 1) for line in lines)
        assert found.keys() == set(archive.namelist())
    return found
