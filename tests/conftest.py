"""Fixtures of several test files."""
import os

import pytest
import torch

import toys
from fakes import plain, small_target
from target import Target


def memo(make):
    """-> get(kind, **options), which calls `make` once for each."""
    made = {}

    def get(kind, **options):
        key = kind, repr(options)
        if key not in made:
            made[key] = make(kind, **options)
        return made[key]
    return get


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(kind, **options) -> directory of a toy target, written once. Not to be changed."""
    return memo(lambda kind, **options: toys.write_target(tmp_path_factory.mktemp(kind), kind, **options))


@pytest.fixture(scope="session")
def target_of(checkpoint):
    """target_of(kind, **options) -> Target in fp32, loaded once. Not to be changed."""
    return memo(lambda kind, **options: Target.load(checkpoint(kind, **options)))


@pytest.fixture(scope="session")
def wanderer():
    """A small target, a prompt, and its greedy continuation (60 tokens), of which the first 30 are all different. Not to be changed."""
    target = small_target(1024, seed=2, layers=4)
    for seed in range(4, 100):
        prompt = torch.randint(1024, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        if len(set(plain(target, prompt, 30))) == 30:
            return target, prompt, plain(target, prompt, 60)
    raise AssertionError("no such prompt")


def pytest_collection_modifyitems(items):
    """What is marked slow runs with CI=1 only, and in .ci/run: the user's own run stays under three minutes."""
    for item in items:
        if item.get_closest_marker("slow") and not os.environ.get("CI"):
            item.add_marker(pytest.mark.skip(reason="slow: with CI=1, and in .ci/run"))
