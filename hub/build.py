"""Write the package as HuggingFace's `kernels` library loads it: `python hub/build.py OUT`.

OUT/README.md is the kernel's card. OUT/build/VARIANT/ holds the sources, `layers.py` and `metadata.json`, once for each
backend that has a name of its own and once for every other. The library imports a variant under the id in its metadata,
so imports become relative, and strings that name the package name that id: a kernel can be loaded beside the package,
and beside another version of itself.
"""

import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

HUB = Path(__file__).resolve().parent
PACKAGE = HUB.parent / "liger_rl"
VARIANTS = {"torch-cpu": "cpu", "torch-cuda": "cuda", "torch-rocm": "rocm", "torch-universal": "cpu"}
# A kernel may import PyTorch and itself alone. Of the integrations there is what layers.py needs.
INTEGRATIONS = re.compile(r"integrations/(__init__\.py|patching\.py|liger\.py)")
# The names that need other libraries are not the kernel's.
OWN_NAMES = """
from liger_rl import distill, fused_linear, head, layers, losses, support

__all__ = [name for name in __all__ if name not in _LAZY]
__all__ += ["distill", "fused_linear", "head", "layers", "losses", "support"]
_LAZY.clear()
"""
NAMES = re.compile(r"liger_rl(\.\w+)*")  # of modules, as string constants have them


def build(out: Path) -> None:
    """Writes the kernel into the folder `out`, in place of what was there."""
    sources = {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    kept = {path: text for path, text in sources.items() if _is_kept(path)}
    kept[Path("layers.py")] = (HUB / "layers.py").read_text(encoding="utf-8")
    kept[Path("__init__.py")] += OWN_NAMES
    digest = hashlib.sha256(repr(sorted(kept.items())).encode()).hexdigest()[:10]
    shutil.rmtree(out, ignore_errors=True)
    for variant, backend in VARIANTS.items():
        identifier = f"_{variant}_{digest}".replace("torch", PACKAGE.name).replace("-", "_")
        written = {str(path): relative(text, len(path.parts), identifier) for path, text in kept.items()}
        written["metadata.json"] = _metadata(identifier, backend, written)
        for name, text in written.items():
            target = out / "build" / variant / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    shutil.copy(HUB / "README.md", out)


def _is_kept(path: Path) -> bool:
    room = path.parts[0]
    return room not in ("step", "trl.py") and (
        room != "integrations" or INTEGRATIONS.fullmatch(path.as_posix()) is not None
    )


def relative(source: str, depth: int, identifier: str) -> str:
    """The source of a module, `depth` names below the kernel's own, without the name of the package."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and re.match(r"liger_rl\b", node.module or ""):
            dots = "." * depth + node.module.removeprefix("liger_rl").removeprefix(".")
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"from {node.module} ", f"from {dots} ", 1)
    text = "".join(lines).replace('"liger_rl"', f'"{identifier}"')
    _check(text)
    return text


def _check(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
        left = [name for name in names if NAMES.fullmatch(name)]
        if left:
            raise ValueError(f"line {node.lineno} names the package, and must not: {left}\n{ast.unparse(node)}")


def _metadata(identifier: str, backend: str, files: dict[str, str]) -> str:
    version = re.search(r'^__version__ = "(\d+)\.', (PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    hashes = {name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in files.items()}
    metadata = {
        "id": identifier,
        "name": "liger-rl",
        "version": int(version[1]),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    return json.dumps(metadata, indent=2) + "\n"


if __name__ == "__main__":
    build(Path(sys.argv[1]))
