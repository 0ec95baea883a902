"""The house rules, read off the source: who may import whom, and which words belong in which room."""

import ast
import importlib
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import liger_rl

PACKAGE = Path(liger_rl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
SYSTEMS = {"transformers", "trl", "liger_kernel", "verl", "peft"}
# Room -> the rooms that it may import, as prefixes of module names: docs/design.md has the picture.
ALLOWED = {
    "__init__": ["integrations", "step", "models", "fused_linear", "distill", "support", "head", "losses"],
    "integrations": [""],
    "trl": ["integrations"],
    "step": ["step", "models", "fused_linear", "head", "losses", "distributed", "kernels", "hints"],
    "models": ["models", "head", "distributed", "kernels"],
    "fused_linear": ["fused_linear", "head", "losses", "distributed", "kernels"],
    "distill": ["distill", "head", "distributed", "kernels"],
    "head": ["head", "distributed", "kernels"],
    "support": ["support", "head", "kernels"],
    "losses": ["losses", "kernels", "hints"],
    "kernels": ["kernels", "hints"],
    "distributed": [],
    "hints": [],
}
# Every other room: torch alone, integrations: anything.
OUTSIDE = {room: {"torch", "triton"} for room in ("kernels", "head", "distill", "support", "losses")} | {"trl": {"trl"}}
POLICY_WORDS = {"advantage", "advantages", "clip", "clipped", "ratio", "ratios", "reward", "rewards", "policy", "kl"}
VOCABULARY_WORDS = {"vocab", "vocabulary", "lm_head", "chunk", "chunks"}


def module_name(path: Path) -> str:
    """Name below the package: "kernels.triton"; "kernels" for kernels/__init__.py; "__init__" for the package's."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): ast.parse(path.read_text()) for path in FILES}


def room(module: str) -> str:
    return module.split(".")[0]


def imports(tree: ast.AST) -> set[str]:
    """Full names of every module a tree imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner.removeprefix("liger_rl.") in MODULES else node.module)
    return found


def own_imports(tree: ast.AST) -> set[str]:
    names = {name for name in imports(tree) if name.split(".")[0] == "liger_rl"}
    return {name.removeprefix("liger_rl").removeprefix(".") or "__init__" for name in names}


def top_level(tree: ast.Module) -> ast.Module:
    """What runs at import: everything but the bodies of functions."""

    class Drop(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

        visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    return Drop().visit(ast.parse(ast.unparse(tree)))


def identifiers(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.add(value)
    return found


def words(identifier: str) -> set[str]:
    """ "clip_ratio" and "ClipRatio" -> clip, ratio, and the whole."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", identifier).lower()
    return {*snake.split("_"), snake}


def graph() -> dict[str, set[str]]:
    return {module: own_imports(tree) - {module} for module, tree in MODULES.items()}


def test_every_room_is_in_the_plan():
    assert {room(module) for module in MODULES} <= set(ALLOWED)


@pytest.mark.parametrize("module", MODULES)
def test_import_direction(module):
    allowed = ALLOWED[room(module)]
    for name in own_imports(MODULES[module]):
        fits = any(prefix in ("", name) or name.startswith(prefix + ".") for prefix in allowed)
        assert fits, f"{module} imports {name}"


def test_no_module_is_imported_by_a_string():
    """Frameworks that need not be installed are; a module of the package has a name that a reader can follow."""
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("liger_rl.kernels"), f"{module}: {node.value}"
            if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                assert room(module) in ("integrations", "__init__"), module


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) not in ("integrations", "step", "models")])
def test_outside_imports(module):
    outside = {name.split(".")[0] for name in imports(MODULES[module])} - {"liger_rl"} - sys.stdlib_module_names
    assert outside <= OUTSIDE.get(room(module), {"torch"})


def test_no_circles():
    TopologicalSorter(graph()).prepare()  # raises CycleError with the circle


def test_no_entry_imports_triton():
    """Triton need not be installed: a module that needs it is imported by the function that launches its kernels."""
    at_import = {module: top_level(tree) for module, tree in MODULES.items()}
    waiting, seen = [module for module in MODULES if module == "__init__" or room(module) == "integrations"], set()
    while waiting:
        name = waiting.pop()
        assert "triton" not in {other.split(".")[0] for other in imports(at_import[name])}, name
        seen.add(name)
        waiting += own_imports(at_import[name]) & MODULES.keys() - seen


def test_importing_the_package_loads_no_other_system():
    # torch may import triton, so what counts is what the package adds.
    systems = ("trl", "liger", "verl")
    code = "import sys, torch; before = set(sys.modules); import liger_rl; "
    code += "print(*sorted(set(sys.modules) - before)); "
    code += "; ".join(f"import liger_rl.integrations.{system}" for system in systems)
    code += f"; assert not {SYSTEMS - {'transformers', 'peft'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = done.stdout.split()
    assert "liger_rl.fused_linear.grpo" in added
    assert not {name.split(".")[0] for name in added} & (SYSTEMS | {"triton"})
    kernels = ("liger_rl.kernels.logit_rows_triton", "liger_rl.losses.fused_triton")
    unwanted = ("torch._dynamo", "liger_rl.integrations", "liger_rl.models", *kernels)
    assert not [name for name in added if name.startswith(unwanted)]


@pytest.mark.parametrize(
    ("rooms", "forbidden"),
    [
        (("kernels", "head", "distill", "support"), POLICY_WORDS),
        (("losses",), VOCABULARY_WORDS),
    ],
    ids=["no policy word on the vocabulary side", "no vocabulary word in the losses"],
)
def test_words(rooms, forbidden):
    trees = {module: tree for module, tree in MODULES.items() if room(module) in rooms}
    assert trees
    found = {(m, name) for m, tree in trees.items() for name in identifiers(tree) if words(name) & forbidden}
    assert not found


def exported(tree: ast.AST) -> dict[str, str]:
    """Name -> the module that it is imported from, wherever in the tree, for imports of the package's own names."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and room(node.module) == "liger_rl"]
    return {alias.name: node.module for node in found for alias in node.names}


@pytest.mark.parametrize("module", ["__init__", "head", "distill", "support", "losses", "fused_linear"])
def test_public_names_are_complete(module):
    package = liger_rl if module == "__init__" else getattr(liger_rl, module)
    assert set(package.__all__) == exported(MODULES[module]).keys()


def test_a_public_name_has_one_home():
    rooms = [liger_rl.head, liger_rl.distill, liger_rl.support, liger_rl.losses, liger_rl.fused_linear]
    names = [name for room in rooms for name in room.__all__]
    assert len(set(names)) == len(names)
    front = set(liger_rl.__all__) - liger_rl._LAZY.keys()
    assert front <= set(names)


def test_front_names_that_need_other_libraries():
    """A type checker reads the imports, Python the table: both have the same names from the same modules."""
    pytest.importorskip("transformers", reason="the names need it")
    (block,) = [node for node in MODULES["__init__"].body if isinstance(node, ast.If)]
    late = exported(ast.Module(body=block.body, type_ignores=[]))
    assert not late.keys() & vars(liger_rl).keys()
    assert late == {name: f"liger_rl.{module}" for name, module in liger_rl._LAZY.items()}
    for name, module in late.items():
        assert getattr(liger_rl, name) is getattr(importlib.import_module(module), name)
    assert set(liger_rl.__all__) <= set(dir(liger_rl))
    with pytest.raises(AttributeError, match="module 'liger_rl' has no attribute 'patch_nothing'"):
        _ = liger_rl.patch_nothing


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_are_short_and_their_results_whole(module):
    """griffe takes each line of Returns that is not indented further for a result of its own."""
    for node in ast.walk(MODULES[module]):
        text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
        if text:
            returns = text.partition("\nReturns:\n")[2].partition("\n\n")[0]
            results = re.findall(r"^    (?! )(\w+: )?", returns, re.MULTILINE)
            assert len(text.split()) <= 300, node.name
            assert len(results) < 2 or all(results), node.name
