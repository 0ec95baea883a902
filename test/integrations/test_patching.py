"""What holds for every patch of another package: TRL, liger-kernel and a package with verl's modules."""

import importlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch

import checkouts
from liger_rl.integrations.patching import Framework

# The ways in which verl 0.9.1 looks its functions up, in files of the same names.
VERL_FILES = {
    "__init__.py": '__version__ = "0.9.1"\n',
    "utils/kernel/linear_cross_entropy.py": """
class LinearCrossEntropy:
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
        raise NotImplementedError

    @staticmethod
    def apply(*args):
        return "verl's own", args

linear_cross_entropy = LinearCrossEntropy.apply
""",
    "utils/experimental/torch_functional.py": """
class FusedLinearForPPO:
    def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
        return "verl's own", self
""",
    "models/transformers/dense_common.py": """
def forward_with_torch_backend(*args):
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return FusedLinearForPPO().forward(*args)

def forward_with_triton_backend(*args):
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(*args)
""",
    "models/mcore/model_forward_fused.py": """
from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

def fused(*args):
    return linear_cross_entropy(*args)
""",
}
VERL_MODELS = ("transformers.dense_common", "mcore.model_forward_fused")


@dataclass
class System:
    package: str
    home: str  # the module that defines what is replaced
    name: str
    replaced: set[str]  # names in that module
    fake_version: Callable[[str | None], None]

    def call(self, verb: str) -> Any:
        short = self.package.removesuffix("_kernel")
        return getattr(importlib.import_module(f"liger_rl.integrations.{short}"), f"{verb}_{short}")

    def patch(self) -> None:
        self.call("patch")()

    def unpatch(self) -> None:
        self.call("unpatch")()

    def patched(self) -> Any:
        return self.call("patched")()

    @property
    def globals(self) -> dict[str, Any]:
        return vars(importlib.import_module(self.home))

    @property
    def now(self) -> Any:
        return self.globals[self.name]


@pytest.fixture
def trl(monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")

    def fake_version(version):
        monkeypatch.setattr(sys.modules["trl"], "__version__", version)

    importlib.import_module("trl.trainer.grpo_trainer")
    names = {"_ChunkedLogProbFunction"}
    if importlib.util.find_spec("peft") is not None:
        names.add("add_fused_lm_head")
    return System("trl", "trl.trainer.utils", "_ChunkedLogProbFunction", names, fake_version)


@pytest.fixture
def liger(monkeypatch):
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")

    def fake_version(version):
        def installed(name):
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", installed)

    name, home = "LigerFusedLinearGRPOLoss", "liger_kernel.chunked_loss.grpo_loss"
    return System("liger_kernel", home, name, {name}, fake_version)


@pytest.fixture
def verl(tmp_path, monkeypatch):
    for name, text in VERL_FILES.items():
        path = tmp_path / "verl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def loaded():
        return [name for name in sys.modules if name.split(".")[0] == "verl"]

    for name in loaded():  # a real one, back afterwards
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    name, home = "linear_cross_entropy", "verl.utils.kernel.linear_cross_entropy"

    def fake_version(version):
        monkeypatch.setattr(importlib.import_module("verl"), "__version__", version)

    system = System("verl", home, name, {name}, fake_version)
    yield system
    system.unpatch()
    for name in loaded():
        del sys.modules[name]


@pytest.fixture(params=["trl", "liger", "verl"])
def system(request) -> System:
    return request.getfixturevalue(request.param)


def test_patching_and_undoing_twice(system):
    before = dict(system.globals)
    system.unpatch()  # of what was never done
    assert system.globals == before
    system.patch()
    first = system.now
    assert {name for name, value in before.items() if system.globals[name] is not value} == system.replaced
    system.patch()
    assert system.now is first
    for _ in range(2):
        system.unpatch()
        assert system.globals == before


def test_a_patch_is_logged_once_and_can_be_asked_for(system, caplog):
    module = importlib.import_module(f"liger_rl.integrations.{system.package.removesuffix('_kernel')}")
    caplog.set_level("INFO", logger="liger_rl")
    assert not module.is_patched()
    with system.patched():
        assert module.is_patched()
        system.patch()
    assert not module.is_patched()
    system.patch()
    assert module.is_patched()
    system.unpatch()
    assert not module.is_patched()
    name = system.package.replace("_", "-")
    messages = [record.message for record in caplog.records if record.name == "liger_rl"]
    assert len(messages) == 2  # of the block and of the call behind it
    for message in messages:
        assert re.match(rf"patched {name} \d+\.\d+\S*: .*\b{system.name}\b.*; \w+", message)


def test_patched_within_a_block(system):
    original = system.now
    with system.patched():
        ours = system.now
        with system.patched():
            assert system.now is ours
        assert system.now is ours
        with system.patched():
            system.unpatch()
            assert system.now is original
        assert system.now is ours
    assert ours is not original is system.now
    with pytest.raises(KeyboardInterrupt), system.patched():
        raise KeyboardInterrupt
    assert system.now is original


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_modules_that_import_the_name(system, before, monkeypatch):
    """Those of the package, under whatever name, before the patch or while it is there; others keep what they hold."""
    original, modules = system.now, {}
    for name in (f"{system.package}.trainer.another", "user_code", f"{system.package}_user_code"):
        modules[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, modules[name])
    inside, *outside = modules.values()

    def imported(module):
        exec(f"from {system.home} import {system.name}, {system.name} as renamed", vars(module))

    for module in (inside, *outside) if before else outside:
        imported(module)
    system.patch()
    if not before:
        imported(inside)
    assert inside.renamed is vars(inside)[system.name] is system.now is not original
    assert all(module.renamed is original for module in outside)
    system.unpatch()
    assert all(module.renamed is vars(module)[system.name] is original for module in modules.values())


def test_threads_that_patch_and_undo(system):
    """Whatever their order, the package ends up whole: all of it patched, or nothing."""
    before, failures, interval = dict(system.globals), [], sys.getswitchinterval()

    def replaced():
        return {name for name in system.replaced if system.globals[name] is not before[name]}

    def work(i):
        try:
            for _ in range(5):
                (system.patch if i % 2 else system.unpatch)()
                with system.patched():
                    pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    sys.setswitchinterval(1e-6)  # turns as often as Python lets them
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert replaced() in (set(), system.replaced)
    system.patch()
    assert replaced() == system.replaced
    system.unpatch()
    assert not replaced()


@pytest.mark.parametrize("loaded_before", [True, False])
def test_verls_two_kinds_of_models(verl, loaded_before):
    """Those for FSDP look their functions up at each forward, those for Megatron import one once."""

    def outputs():
        dense, fused = (importlib.import_module(f"verl.models.{name}") for name in VERL_MODELS)
        arguments = (torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2).long())
        functions = (dense.forward_with_triton_backend, dense.forward_with_torch_backend, fused.fused)
        return [function(*arguments) for function in functions]

    if loaded_before:
        assert [output[0] for output in outputs()] == ["verl's own"] * 3
    verl.patch()
    assert all(isinstance(output[0], torch.Tensor) for output in outputs())
    verl.unpatch()
    assert [output[0] for output in outputs()] == ["verl's own"] * 3


@pytest.mark.parametrize(
    ("file", "parameter"),
    [("utils/experimental/torch_functional.py", "input_ids"), ("utils/kernel/linear_cross_entropy.py", "reduction")],
)
def test_one_function_that_is_not_verls_leaves_both(verl, file, parameter, tmp_path):
    path = tmp_path / "verl" / file
    path.write_text(VERL_FILES[file].replace(parameter, "another"), encoding="utf-8")
    torch_backend = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO
    before, forward = verl.now, torch_backend.forward
    with pytest.raises(RuntimeError, match=f"{parameter}.*nothing was patched"):
        verl.patch()
    assert verl.now is before
    assert torch_backend.forward is forward


# Module of the integration -> the versions that it supports, as its refusal says them, and its patch's arguments.
SUPPORTED = {
    "liger": ("liger-kernel >= 0.8, < 0.9", ()),
    "nemo_rl": ("nemo-rl >= 0.6, < 0.8", ()),
    "openrlhf": ("openrlhf >= 0.11, < 0.12", ()),
    "prime_rl": ("prime-rl >= 0.8, < 0.10", ()),
    "skyrl": ("skyrl >= 0.3, < 0.4", ("fsdp",)),
    "torchtitan": ("torchtitan >= 0.3, < 0.4", ()),
    "trl": ("trl >= 1.15, < 1.17", ()),
    "verl": ("verl >= 0.5, < 0.11", ()),
}


def patch_function(short: str) -> Callable:
    return getattr(importlib.import_module(f"liger_rl.integrations.{short}"), f"patch_{short}")


@pytest.mark.parametrize("short", SUPPORTED)
def test_other_versions_are_refused(short, monkeypatch):
    """By the module's or the metadata's word, before any other module of the package is imported."""
    supported, arguments = SUPPORTED[short]
    package = supported.split()[0]
    lowest, below = re.findall(r"\d+\.(\d+)", supported)
    major = re.search(r"\d+", supported)[0]
    module = ModuleType(package.replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for version in (
        f"{major}.{int(lowest) - 1}.9",
        f"{major}.{below}.0",
        f"{major}.{below}.0.dev0",
        "unknown",
        "",
        None,
    ):
        module.__version__ = version
        checkouts.say_version(monkeypatch, package, version)
        with pytest.raises(ImportError) as raised:
            patch_function(short)(*arguments)
        assert str(raised.value).startswith(f"{supported} is supported, found {version}; nothing was patched")


@pytest.mark.parametrize("short", SUPPORTED)
def test_without_the_package(short, monkeypatch):
    """As if it were not found, loaded before or not."""
    supported, arguments = SUPPORTED[short]
    package = supported.split()[0]
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    with pytest.raises(ImportError, match=f"{package} is not installed: .*; nothing was patched"):
        patch_function(short)(*arguments)


def stand_in(monkeypatch, framework):
    """Modules with functions and methods as the rows name them."""
    for patch in framework.patches:
        for i in range(patch.module.count(".") + 1):
            module = ModuleType(patch.module.rsplit(".", i)[0])
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, sys.modules.get(module.__name__, module))
        parameters = ", ".join(name.rstrip("?") for name in (patch.parameters or "").split())
        for name in {patch.name, patch.checked}:
            owner, _, attribute = name.rpartition(".")
            home = sys.modules[patch.module]
            if owner:
                home = vars(home).setdefault(owner, type(owner, (), {}))
            exec(f"def function({parameters}): pass", values := {})
            setattr(home, attribute, values["function"])


@pytest.mark.parametrize("short", ["nemo_rl", "openrlhf", "prime_rl", "skyrl", "torchtitan", "verl"])
def test_every_row_is_put_in_place_and_taken_back(short, monkeypatch, caplog):
    """In modules made from the table; each framework's own tests run with its own modules."""
    module = importlib.import_module(f"liger_rl.integrations.{short}")
    (framework,) = (value for value in vars(module).values() if isinstance(value, Framework))
    for name in [name for name in sys.modules if name.split(".")[0] == framework.name.replace("-", "_")]:
        monkeypatch.delitem(sys.modules, name)
    stand_in(monkeypatch, framework)
    version = ".".join(map(str, (framework.below[0], framework.below[1] - 1)))
    sys.modules[framework.name.replace("-", "_")].__version__ = version
    checkouts.say_version(monkeypatch, framework.name, version)
    groups = {patch.group for patch in framework.patches}
    before = [patch.find() for patch in framework.patches]
    caplog.set_level("INFO", logger="liger_rl")
    with framework.within(*groups):
        assert module.is_patched()
        assert [patch.original for patch in framework.patches] == before
        for patch in framework.patches:
            owner, _, attribute = patch.name.rpartition(".")
            home = sys.modules[patch.module]
            assert vars(vars(home)[owner] if owner else home)[attribute] is patch.replacement
    assert not module.is_patched()
    names = ", ".join(patch.name for patch in framework.patches)
    assert caplog.messages == [f"patched {framework.name} {version}: {names}; {framework.gain}"]
    assert [patch.find() for patch in framework.patches] == before


def test_another_version_changes_nothing(system):
    before = dict(system.globals)
    system.fake_version("0.4.1")
    for call in (system.patch, lambda: system.patched().__enter__()):
        with pytest.raises(ImportError, match="nothing was patched"):
            call()
    assert system.globals == before


@pytest.mark.parametrize("version", ["0.5.0", "0.9.2.dev", "0.10.0.dev"])
def test_other_supported_versions(verl, version):
    verl.fake_version(version)
    with verl.patched():
        assert verl.now.__module__ == "liger_rl.integrations.verl"


BEFORE_IMPORT = """
import sys

from liger_rl.integrations import liger, trl, trl_adapters

assert not {"trl", "liger_kernel"} & set(sys.modules)
liger.patch_liger()
from liger_kernel import chunked_loss

assert chunked_loss.LigerFusedLinearGRPOLoss is liger.LigerFusedLinearGRPOLoss
trl.patch_trl()
from trl.trainer import grpo_trainer, rloo_trainer, utils

assert isinstance(utils._ChunkedLogProbFunction, trl.FusedLogProbs)
for module in (utils, grpo_trainer, rloo_trainer):
    assert module.add_fused_lm_head is trl_adapters.add_fused_lm_head
liger.unpatch_liger()
trl.unpatch_trl()
from trl.kernels import ChunkedLogProbFunction

assert chunked_loss.LigerFusedLinearGRPOLoss.__module__ == "liger_kernel.chunked_loss.grpo_loss"
assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction
for module in (utils, grpo_trainer, rloo_trainer):
    assert module.add_fused_lm_head.__module__ == "trl.trainer.utils"
"""


def test_patching_before_the_packages_are_imported():
    for package in ("trl", "liger_kernel", "peft"):
        pytest.importorskip(package, reason="the patches are of all of them")
    done = subprocess.run([sys.executable, "-c", BEFORE_IMPORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
