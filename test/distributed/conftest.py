"""Ranks for every test here: on CPU with gloo, and on two GPUs with NCCL where there are two."""

import pytest

from devices import NEEDS_GPUS
from ranks import Ranks


@pytest.fixture(scope="session")
def started():
    """The processes of the session, in a list, so that a test whose ranks hang can be followed by others."""
    kept: list[Ranks] = []
    yield kept
    for ranks in kept:
        ranks.stop()


@pytest.fixture
def ranks(started) -> Ranks:
    if not started or not started[-1].alive:
        started.append(Ranks())
    return started[-1]


@pytest.fixture(
    params=[(2, "cpu"), (4, "cpu"), pytest.param((2, "cuda"), marks=NEEDS_GPUS)], ids=lambda p: f"{p[0]} {p[1]}"
)
def world(request) -> dict:
    """Arguments of `Ranks.run`."""
    return {"world": request.param[0], "device": request.param[1]}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPUS)])
def two(request) -> dict:
    """Arguments of `Ranks.run`, for what two ranks show as well as four."""
    return {"world": 2, "device": request.param}
