"""What holds for every patch of another package, in stand-ins for all of them.

A stand-in has modules, functions and methods as the rows name them. Each framework's own tests run with its own.
"""

import importlib
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import checkouts
from liger_rl.integrations.patching import Framework, Patch
from threads import in_threads

# Module of the integration -> the versions that it supports, as its refusal says them.
SUPPORTED = {
    "liger": "liger-kernel >= 0.8, < 0.9",
    "trl": "trl >= 1.15, < 1.17",
    "verl": "verl >= 0.5, < 0.11",
}


class System(NamedTuple):
    framework: Framework
    patch: Callable[[], None]
    unpatch: Callable[[], None]
    patched: Callable[[], AbstractContextManager[None]]

    def state(self) -> dict[tuple, Any]:
        """Place -> what it holds, of every row."""
        places = {}
        for patch in self.framework.patches:
            owner, _, attribute = patch.name.rpartition(".")
            for name in {patch.module, *patch.home} & sys.modules.keys():
                holder = vars(sys.modules[name]).get(owner) if owner else sys.modules[name]
                if holder is not None and attribute in vars(holder):
                    places[name, owner, attribute] = vars(holder)[attribute]
        return places

    def replaced(self, before: dict[tuple, Any]) -> set[tuple]:
        return {place for place, value in self.state().items() if value is not before[place]}


def system_of(name: str) -> System:
    home = {"trl": "trl.patches"}.get(name, name)
    module = importlib.import_module(f"liger_rl.integrations.{home}")
    (framework,) = (value for value in vars(module).values() if isinstance(value, Framework))
    functions = [getattr(module, f"{verb}_{name}") for verb in ("patch", "unpatch", "patched")]
    return System(framework, *functions)


def say(monkeypatch, framework: Framework, version: str | None) -> None:
    sys.modules[framework.name.replace("-", "_")].__version__ = version
    checkouts.say_version(monkeypatch, framework.name, version)


def newest(framework: Framework) -> str:
    return f"{framework.below[0]}.{framework.below[1] - 1}"


def add_function(monkeypatch, patch: Patch, name: str, parameters: str) -> None:
    """Also to a class of transformers or PEFT that is not a stand-in, until the test ends."""
    owner, _, attribute = name.rpartition(".")
    home = sys.modules[patch.module]
    if owner:
        if owner not in vars(home):
            monkeypatch.setattr(home, owner, type(owner, (), {}), raising=False)
        home = vars(home)[owner]
    exec(f"def function({parameters}): pass", values := {})
    monkeypatch.setattr(home, attribute, values["function"], raising=False)


def stand_in(name: str, monkeypatch) -> System:
    system = system_of(name)
    top = system.framework.name.replace("-", "_")
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == top]:
        monkeypatch.delitem(sys.modules, loaded)
    for patch in system.framework.patches:
        for i in range(patch.module.count(".") + 1):
            module = ModuleType(patch.module.rsplit(".", i)[0])
            module.__path__, module.__spec__ = [], ModuleSpec(module.__name__, None)
            monkeypatch.setitem(sys.modules, module.__name__, sys.modules.get(module.__name__, module))
        parameters = ", ".join((patch.parameters or "").split())
        for function in sorted({patch.name, patch.checked}):  # a class before its method
            add_function(monkeypatch, patch, function, parameters)
    say(monkeypatch, system.framework, newest(system.framework))
    return system


@pytest.fixture(params=SUPPORTED)
def system(request, monkeypatch):
    made = stand_in(request.param, monkeypatch)
    yield made
    made.unpatch()


def test_patching_and_undoing_twice(system):
    before = system.state()
    system.unpatch()  # of what was never done
    assert system.state() == before
    system.patch()
    first = system.state()
    replaced = system.replaced(before)
    assert replaced
    system.patch()
    assert system.state() == first
    for _ in range(2):
        system.unpatch()
        assert system.state() == before


def test_every_row_is_put_in_place_and_taken_back(system):
    before, framework = system.state(), system.framework
    with framework.within():
        for patch in framework.patches:
            assert patch.replacement in system.state().values()
            assert any(patch.original is value for value in before.values())
    assert system.state() == before


def test_a_patch_is_logged_once_and_can_be_asked_for(system, caplog):
    framework = system.framework
    caplog.set_level("INFO", logger="liger_rl")
    assert not framework.is_patched()
    with system.patched():
        assert framework.is_patched()
        system.patch()
    assert not framework.is_patched()
    system.patch()
    system.unpatch()
    assert not framework.is_patched()
    first, second = (record.message for record in caplog.records if record.name == "liger_rl")
    assert first == second  # of the block and of the call behind it
    assert re.match(rf"patched {framework.name} \d+\.\d+\S*: .*; {re.escape(framework.gain)}$", first)
    assert any(patch.name in first for patch in framework.patches)


def test_patched_within_a_block(system):
    before = system.state()
    with system.patched():
        ours = system.state()
        with system.patched():
            assert system.state() == ours
        assert system.state() == ours
        with system.patched():
            system.unpatch()
            assert system.state() == before
        assert system.state() == ours
    assert ours != before == system.state()
    with pytest.raises(KeyboardInterrupt), system.patched():
        raise KeyboardInterrupt
    assert system.state() == before


def test_a_row_of_two_tables_stays_until_both_are_undone(system):
    row, before = system.framework.patches[0], system.state()
    other = Framework(system.framework.name, (0, 0), (99, 0), row, gain="the same row")
    for first, second in ((system.framework, other), (other, system.framework)):
        first.patch()
        with second.within():
            first.patch()
        second.patch()
        first.unpatch()
        assert (first.is_patched(), second.is_patched(), row.patched) == (False, True, True)
        with first.within():
            second.unpatch()
        second.unpatch()
        assert (second.is_patched(), row.patched) == (False, False)
        assert system.state() == before


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_modules_that_import_the_name(system, before, monkeypatch):
    """Those of the package, under whatever name, before the patch or while it is there; others keep what they hold."""
    for patch in system.framework.patches:
        home, name, package = sys.modules[patch.module], patch.name, patch.module.split(".")[0]
        if name not in vars(home) or package not in patch.home:
            continue  # a method, a name that is replaced in other modules
        original, modules = vars(home)[name], {}
        for place in (f"{package}.trainer.another", "user_code", f"{package}_user_code"):
            modules[place] = ModuleType(place)
            monkeypatch.setitem(sys.modules, place, modules[place])
        inside, *outside = modules.values()

        def imported(module, home=home, name=name):
            exec(f"from {home.__name__} import {name}, {name} as renamed", vars(module))

        for module in (inside, *outside) if before else outside:
            imported(module)
        system.patch()
        if not before:
            imported(inside)
        assert inside.renamed is vars(inside)[name] is vars(home)[name] is not original
        assert all(module.renamed is original for module in outside)
        system.unpatch()
        assert all(module.renamed is vars(module)[name] is original for module in (inside, *outside))
        monkeypatch.delattr(inside, "renamed")


def test_threads_that_patch_and_undo(system):
    """Whatever their order, the package ends up whole: all of it patched, or nothing."""
    before = system.state()
    with system.patched():
        whole = system.replaced(before)

    def within_after(change):
        change()
        with system.patched():
            pass

    in_threads(*[partial(within_after, system.patch), partial(within_after, system.unpatch)] * 2, times=5)
    assert system.replaced(before) in (set(), whole)
    system.patch()
    assert system.replaced(before) == whole
    system.unpatch()
    assert system.state() == before


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_row_that_is_not_what_its_version_says_leaves_all(name, monkeypatch):
    for row in range(len(system_of(name).framework.patches)):
        for parameters, message in (("another", "must take .*, found .another.*"), (None, "has no .* here")):
            system = stand_in(name, monkeypatch)
            patch = system.framework.patches[row]
            if parameters and patch.parameters is None:
                continue  # which takes any
            add_function(monkeypatch, patch, patch.checked if parameters else patch.name, parameters or "")
            if parameters is None:
                owner, _, attribute = patch.name.rpartition(".")
                delattr(vars(sys.modules[patch.module])[owner] if owner else sys.modules[patch.module], attribute)
            before = system.state()
            with pytest.raises(RuntimeError, match=f"{message}; nothing was patched"):
                system.patch()
            assert system.state() == before


@pytest.mark.parametrize("name", SUPPORTED)
def test_other_versions_are_refused(name, monkeypatch):
    """By the module's or the metadata's word, before any other module of the package is imported."""
    supported, system = SUPPORTED[name], system_of(name)
    framework = system.framework
    module = ModuleType(framework.name.replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    lower, above = f"{framework.lowest[0]}.{framework.lowest[1] - 1}.9", ".".join(map(str, framework.below))
    for version in (lower, f"{above}.0", f"{above}.0.dev0", "unknown", "", None):
        say(monkeypatch, framework, version)
        for call in (system.patch, lambda: system.patched().__enter__()):
            with pytest.raises(ImportError) as raised:
                call()
            assert str(raised.value).startswith(f"{supported} is supported, found {version}; nothing was patched")
    monkeypatch.setitem(sys.modules, module.__name__, None)  # as if it were not found, loaded before or not
    with pytest.raises(ImportError, match=f"{framework.name} is not installed: .*; nothing was patched"):
        system.patch()


@pytest.mark.parametrize("name", SUPPORTED)
def test_pages_and_extras_have_the_supported_versions(name):
    supported, framework = SUPPORTED[name], system_of(name).framework
    root = Path(__file__).resolve().parents[2]
    assert f"{supported} is supported" in (root / "docs" / f"{name}.md").read_text(encoding="utf-8")
    oldest = ".".join(map(str, framework.lowest))
    cell = oldest if oldest == newest(framework) else f"{oldest} to {newest(framework)}"
    table = (root / "docs" / "frameworks.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| \[.*?\]\({name}\.md\).*? \| (.*?) \|", table, re.MULTILINE)
    assert set(rows) == {cell}
    extras = re.findall(rf'"{framework.name}(>=[^"]*<[^"]*)"', (root / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(extras) <= {supported.removeprefix(framework.name).replace(" ", "")}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_versions(name, monkeypatch):
    system = stand_in(name, monkeypatch)
    before, framework = system.state(), system.framework
    for version in (".".join(map(str, framework.lowest)), f"{newest(framework)}.2.dev"):
        say(monkeypatch, framework, version)
        with system.patched():
            assert system.replaced(before)
