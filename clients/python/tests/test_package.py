"""The package builds, installs into a clean environment, and the examples run with it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Optional

import pytest
from stage import Stage

PACKAGE = Path(__file__).parents[1]
EXAMPLES = Path(__file__).parents[3] / "examples" / "python"
#: What each example prints, among other things.
SAYS = {
    "agent": "The primes below 30 are [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]",
    "basic": "SOME INPUT",
    "checkpoint": "the command went on and wrote 20 lines",
    "fork": "three copies say 100, 400, 900",
    "handoff": "40 lines, none missing, none doubled",
    "reconnect": "all 20 lines are here, exit code 0",
    "snapshot": "hello snapshot",
}


def run(*command: Any, **options: Any) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=50, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, PACKAGE)
    (wheel,) = place.glob("*.whl")
    assert "baton_sandbox/py.typed" in zipfile.ZipFile(wheel).namelist()
    return wheel


def environment(interpreter: str, wheel: Path, place: Path) -> Path:
    """A Python that has the package and what it needs, and nothing else."""
    run(interpreter, "-m", "venv", "--without-pip", place / "venv")
    python = place / "venv" / "bin" / "python"
    run(*PIP, "--python", python, "install", wheel)
    return python


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(sys.executable, wheel, tmp_path_factory.mktemp("package"))


def test_the_clean_environment_has_the_package_and_its_dependency(python: Path) -> None:
    code = """if True:
        import baton_sandbox, importlib.metadata
        names = [found.metadata["Name"] for found in importlib.metadata.distributions()]
        print(sorted(names), baton_sandbox.__file__)"""
    said = run(python, "-c", code, cwd="/")
    assert said.startswith("['baton-sandbox', 'websockets']") and "site-packages" in said


def test_every_example_is_known() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(SAYS)


def oldest() -> Optional[str]:
    """An interpreter of the oldest Python the package says it is for, if there is one here."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for found in [shutil.which("python3.9"), *versions.glob("3.9.*/bin/python")]:
        code = "import sys, venv; print(sys.version_info[:2])"
        asked = found and subprocess.run([found, "-c", code], capture_output=True, text=True, timeout=20, check=False)
        if asked and asked.stdout == "(3, 9)\n":
            return str(found)
    return None


def test_the_oldest_python_reads_every_file() -> None:
    assert 'requires-python = ">=3.9"' in (PACKAGE / "pyproject.toml").read_text()
    files = [*PACKAGE.glob("src/**/*.py"), *EXAMPLES.glob("*.py")]
    assert len(files) > 15
    for file in files:
        ast.parse(file.read_text(), str(file), feature_version=(3, 9))


@pytest.mark.skipif(oldest() is None, reason="there is no Python 3.9 here")
def test_the_oldest_python_runs_it(wheel: Path, stage: Stage, tmp_path: Path) -> None:
    python = environment(oldest() or "", wheel, tmp_path)
    address = stage.do_now("proxy", to="a")["address"]
    for name in ("basic", "reconnect"):
        said = run(python, EXAMPLES / f"{name}.py", env={**os.environ, "BATON_URL": f"ws://{address}"}, cwd="/")
        assert SAYS[name] in said


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs(name: str, python: Path, stage: Stage) -> None:
    address = stage.do_now("proxy", to="a")["address"]
    said = run(python, EXAMPLES / f"{name}.py", env={**os.environ, "BATON_URL": f"ws://{address}"}, cwd="/")
    assert SAYS[name] in said
