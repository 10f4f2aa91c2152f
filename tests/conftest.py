"""Fixtures of several test files."""
import pytest

import toys


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(kind, **options) -> directory of a toy target, written once. Not to be changed."""
    made = {}

    def get(kind, **options):
        key = kind, repr(options)
        if key not in made:
            made[key] = toys.write_target(tmp_path_factory.mktemp(kind), kind, **options)
        return made[key]
    return get
