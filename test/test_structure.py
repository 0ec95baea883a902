"""The house rules, read off the source: who may import whom, and which words belong in which room."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import liger_rl

PACKAGE = Path(liger_rl.__file__).parent
FUNCTIONS_AND_CLASSES = [name for name in liger_rl.__all__ if callable(getattr(liger_rl, name))]
FILES = sorted(PACKAGE.rglob("*.py"))
BENCHMARK = Path(__file__).resolve().parents[1] / "benchmark"
SYSTEMS = {"transformers", "trl", "liger_kernel", "verl", "peft"}
# Room -> what of the package it may import, as prefixes of module names. The one direction is integrations -> grpo,
# from_logits -> logprobs, divergence, policy -> head, given_logits -> kernels.
ALLOWED = {
    "__init__": [
        "grpo",
        "reference_loss",
        "from_logits",
        "logprobs",
        "divergence",
        "topk",
        "head",
        "policy",
        "distributed",
        "kernels.transform",
    ],
    "__main__": ["__init__", "logprobs", "head", "kernels"],
    "integrations": [""],
    "grpo": [
        "blocks_loss",
        "one_pass_loss",
        "reference_loss",
        "logprobs",
        "head",
        "policy",
        "distributed",
        "kernels.transform",
    ],
    "blocks_loss": ["one_pass_loss", "head", "policy", "kernels"],
    "reference_loss": ["one_pass_loss", "head", "policy", "kernels"],
    "one_pass_loss": ["logprobs", "head", "policy", "distributed", "kernels"],
    "from_logits": ["logprobs", "given_logits", "head", "policy", "kernels.transform"],
    "logprobs": ["head", "given_logits", "distributed", "kernels"],
    "divergence": ["head", "distributed", "kernels.transform"],
    "topk": ["head", "distributed"],
    "given_logits": ["given_logits", "head", "policy", "kernels", "once"],
    "head": ["head", "distributed", "kernels", "once"],
    "policy": ["policy", "distributed", "kernels.devices", "kernels.launches", "kernels.softmax", "once"],
    "kernels": ["kernels"],
    "distributed": [],
    "once": [],
}
LONGEST_CHAIN = 13  # of imports, module by module
# Every other room: torch alone, integrations: anything.
OUTSIDE = {"kernels": {"torch", "triton"}, "policy": {"torch", "triton"}}
TRITON = {
    "kernels": {
        "softmax", "compiled", "tile_triton", "saved_exponentials_triton", "selection_triton", "left_out_blocks_triton",
        "launches", "bounds_triton", "blocks_triton", "epilogue", "matrix_triton", "tile_epilogues",
        "hopper_gluon", "hopper_pairs_gluon", "several_triton", "support_triton", "divergence_triton",
        "kept_pair_triton", "pair_tiles", "pair_epilogue", "sparse_pair_triton",
    },
    "policy": {"fused_triton"},
}  # fmt: skip
# Parameters of a function, without self, cls, ctx and the keywords behind `**`.
MOST_PUBLIC, MOST_INTERNAL = 12, 8
# Functions that stand in for another library's, and have its parameters.
MIRRORS = {
    "integrations.liger": {"LigerFusedLinearGRPOLoss.__init__", "LigerFusedLinearGRPOLoss.forward"},
    "integrations.nemo_rl": {"from_parallel_hidden_states_to_logprobs"},
    "integrations.openrlhf": {"_forward"},
    "integrations.skyrl": {"fused_lm_head_logprob_apply"},
    "integrations.trl": {"FusedLogProbs.apply"},
    "integrations.trl_divergence": {"FusedDivergence.apply", "_chunked_divergence_loss"},
}
# A product's operands and what its epilogue is to do with them, which go to the kernel as they are.
LONG = {"kernels.epilogue": {"gemm_fold", "_fold_tiles"}}
# In how many modules an option of the head is named in code. Each is a field, a public keyword, a check and what it
# changes; options of other things have the names chunk_tokens and fixed_shape, too.
MOST_NAMED = {
    "grad_tolerance": 12,
    "compute_dtype": 17,
    "chunk_tokens": 13,
    "chunk_vocab": 10,
    "max_extra_bytes": 7,
    "fixed_shape": 17,
    "batch_invariant": 5,
    "topk": 8,
}
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


def texts(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


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


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) != "integrations"])
def test_outside_imports(module):
    outside = {name.split(".")[0] for name in imports(MODULES[module])} - {"liger_rl"} - sys.stdlib_module_names
    # typing_extensions comes with torch, and is looked at by type checkers alone.
    assert outside - {"typing_extensions"} <= OUTSIDE.get(room(module), {"torch"})


def test_no_circles():
    TopologicalSorter(graph()).prepare()  # raises CycleError with the circle


def test_no_circles_in_the_benchmark():
    if not BENCHMARK.is_dir():
        pytest.skip("the benchmark is not part of an installed package")
    names = {path.relative_to(BENCHMARK.parent).with_suffix(""): path for path in BENCHMARK.rglob("*.py")}
    trees = {
        ".".join(name.parts).removesuffix(".__init__"): ast.parse(path.read_text()) for name, path in names.items()
    }
    edges = {}
    for module, tree in trees.items():
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (inner & trees.keys()) or {node.module}
        edges[module] = {name for name in found if name in trees and name != module}
    TopologicalSorter(edges).prepare()


def test_chains_of_imports_are_short():
    depth = {}
    edges = graph()
    for module in TopologicalSorter(edges).static_order():
        depth[module] = 1 + max((depth[other] for other in edges.get(module, ())), default=0)
    assert max(depth.values()) <= LONGEST_CHAIN, sorted(depth.items(), key=lambda item: -item[1])[:5]


def test_rules_see_what_they_forbid():
    """The checks above are no use if they cannot find anything."""
    tree = ast.parse("def f():\n    from liger_rl.kernels import gemm\n    import trl.trainer\nimport liger_rl.policy")
    assert own_imports(tree) == {"kernels.gemm", "policy"}
    assert "trl.trainer" in imports(tree)
    assert imports(top_level(tree)) == {"liger_rl.policy"}
    assert "clip" in words("clip_low") & words("PPOClip")
    assert "lm_head" in words("lm_head")


def test_triton_is_imported_by_its_own_modules_and_only_when_needed():
    compiled = {f"{room}.{name}" for room, names in TRITON.items() for name in names}
    assert compiled <= MODULES.keys()
    for module, tree in MODULES.items():
        at_import = imports(top_level(tree))
        if module not in compiled:
            assert not {name for name in at_import if name.split(".")[0] == "triton"}, module
            assert not {f"liger_rl.{name}" for name in compiled} & at_import, module


def test_importing_the_package_loads_no_other_system():
    # torch may import triton by itself, so what counts is what the package adds to torch.
    code = "import sys, torch; before = set(sys.modules); import liger_rl; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = done.stdout.split()
    assert "liger_rl.grpo" in added
    assert not {name.split(".")[0] for name in added} & (SYSTEMS | {"triton"})
    unwanted = ("liger_rl.integrations", "liger_rl.kernels.tile_triton", "liger_rl.policy.fused_triton")
    assert not [name for name in added if name.startswith(unwanted)]


@pytest.mark.parametrize(
    ("rooms", "forbidden"),
    [
        (("kernels", "head"), POLICY_WORDS),
        (("policy",), VOCABULARY_WORDS),
    ],
    ids=["no policy word on the vocabulary side", "no vocabulary word on the policy side"],
)
def test_words(rooms, forbidden):
    trees = {module: tree for module, tree in MODULES.items() if room(module) in rooms}
    assert trees
    found = {(m, name) for m, tree in trees.items() for name in identifiers(tree) if words(name) & forbidden}
    assert not found


def host_functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function but those that Triton compiles, by its name within classes and functions."""
    for node in ast.iter_child_nodes(tree):
        name = f"{inside}{getattr(node, 'name', '')}"
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(each) for each in node.decorator_list):
            yield name, node
        nested = isinstance(node, (ast.ClassDef, ast.FunctionDef))
        yield from host_functions(node, f"{name}." if nested else inside)


def parameters(function: ast.FunctionDef) -> int:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg]))]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


def test_signatures_are_short():
    public = {name: vars(liger_rl)[name].__module__.removeprefix("liger_rl.") for name in FUNCTIONS_AND_CLASSES}
    found = []
    for module, tree in MODULES.items():
        for name, function in host_functions(tree):
            is_public = public.get(name.split(".")[0]) == module
            if parameters(function) > (MOST_PUBLIC if is_public else MOST_INTERNAL):
                found.append((module, name))
    excepted = [(module, name) for module, names in (MIRRORS | LONG).items() for name in names]
    assert sorted(found) == sorted(excepted)  # an exception that is none any more goes


def test_options_are_named_in_few_modules():
    assert MOST_NAMED.keys() <= {field.name for field in dataclasses.fields(liger_rl.HeadOptions)}
    names = {module: identifiers(tree) | texts(tree) for module, tree in MODULES.items()}
    for name, most in MOST_NAMED.items():
        named = [module for module, found in names.items() if name in found]
        assert len(named) <= most, (name, named)


def test_public_names_are_documented():
    for name in liger_rl.__all__:
        value = getattr(liger_rl, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue  # a table, such as PRESETS: its room's docstring explains it
        document = inspect.getdoc(value) or ""
        # A dataclass or NamedTuple without one gets its signature for a docstring.
        assert document, name
        assert not document.startswith(f"{name}("), name


def test_public_names_are_sorted_and_complete():
    tree = MODULES["__init__"]
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(liger_rl.__all__) == imported
