"""README.md drifts unless something reads it: line counts, file names, options."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+\.py)` \| (\d+) \|", README, re.M)


def test_files_are_listed():
    assert {name for name, _ in ROWS} == {path.name for path in ROOT.glob("*.py")}


@pytest.mark.parametrize("name, lines", ROWS)
def test_line_counts(name, lines):
    assert len((ROOT / name).read_text().splitlines()) == int(lines)


def test_options_exist():
    """Every --option on a command line of the README is one that the command knows."""
    commands = re.findall(r"python (?:-m )?([\w./]+)(.*)", README)
    assert len(commands) >= 5
    for name, rest in commands:
        path = ROOT / (name if name.endswith(".py") else name.replace(".", "/") + ".py")
        known = "".join(p.read_text() for p in (path, ROOT / "run.py") if p == path or name == "train.py") if path.exists() else ""
        for option in set(re.findall(r"(?<= )--[a-z-]+", rest)) - {"--help"} if path.exists() else ():
            assert f'"{option}"' in known, f"{name} has no {option}"


def test_the_python_example_runs(capsys):
    if not (ROOT / "tiny" / "drafter" / "model.safetensors").exists():
        pytest.skip("the embedded drafter is not there")
    exec(re.search(r"```python\n(.*?)```", README, re.S)[1], {})
    text, tau = capsys.readouterr().out.rstrip().rsplit(" ", 1)
    assert "Mia" in text and float(tau) > 1


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README
