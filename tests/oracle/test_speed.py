"""Every bar of tests/speed.py, measured quickly; 0.7 of a bar that is a time, since machines are noisy."""
import pytest

pytest.importorskip("transformers")
pytest.importorskip("dflash")
import speed

NAMES = [
    "speed-up, embedded pair, arithmetic", "speed-up, embedded pair, code", "speed-up, embedded pair, story",
    "control: tau of a 4-gram table / the drafter's, arithmetic",
    "plain against transformers' generate, embedded pair", "speculative against the authors' package, embedded pair",
    "plain against transformers' generate, SmolLM2 + random drafter", "speculative against the authors' package, SmolLM2 + random drafter",
    "the loop itself: cycle less its bare forwards, SmolLM2's shape"]


@pytest.fixture(scope="module")
def rows(request):
    rows = list(speed.all_rows(quick=True))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *rows, sep="\n")
    assert not {row.name for row in rows if row.bar is not None} - set(NAMES)
    return {row.name: row for row in rows}


@pytest.mark.parametrize("name", NAMES)
def test_bar(rows, name):
    if name not in rows or rows[name].value is None:
        pytest.skip("; ".join(f"{row.name}: {row.detail['because']}" for row in rows.values() if row.value is None))
    assert rows[name].holds(0.7), str(rows[name])
