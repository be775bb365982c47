"""The package builds and installs into clean environments; the examples and the README run with it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Optional

import pytest
from testbed import Testbed

PACKAGE = Path(__file__).parents[1]
EXAMPLES = Path(__file__).parents[3] / "examples" / "python"
#: A part of the output of each example.
EXAMPLE_OUTPUT = {
    "agent": "The primes below 30 are [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]",
    "basic": "SOME INPUT",
    "checkpoint": "the command continued and wrote 20 lines",
    "fork": "three copies answer 100, 400, 900",
    "handoff": "40 lines, none missing, none repeated",
    "reconnect": "all 20 lines arrived, exit code 0",
    "snapshot": "hello snapshot",
}
README_ADDRESS = "ws://127.0.0.1:8080"
READMES = [PACKAGE / "README.md", PACKAGE.parents[1] / "README.md"]
#: Every Python block of the READMEs, and the output that is shown below it.
README_BLOCKS = [
    block
    for readme in READMES
    for block in re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", readme.read_text(), re.MULTILINE | re.DOTALL)
]
#: The oldest and the newest Python that the package is for; `scripts/packages` tries all of them.
VERSIONS = ["3.9", "3.13"]


def run(*command: Any, **options: Any) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=50, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, PACKAGE)
    (wheel,) = directory.glob("*.whl")
    assert "baton_sandbox/py.typed" in zipfile.ZipFile(wheel).namelist()
    return wheel


def environment(interpreter: str, wheel: Path, directory: Path) -> Path:
    """A Python that has the package and its dependencies, and nothing else."""
    run(interpreter, "-m", "venv", "--without-pip", directory / "venv")
    python = directory / "venv" / "bin" / "python"
    run(*PIP, "--python", python, "install", wheel)
    return python


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(sys.executable, wheel, tmp_path_factory.mktemp("package"))


def address_of(testbed: Testbed) -> str:
    return f"ws://{testbed.do_now('proxy', to='a')['address']}"


def test_the_clean_environment_has_the_package_and_its_dependency(python: Path) -> None:
    code = """if True:
        import baton_sandbox, importlib.metadata
        names = [found.metadata["Name"] for found in importlib.metadata.distributions()]
        print(sorted(names), baton_sandbox.__file__)"""
    output = run(python, "-c", code, cwd="/")
    assert output.startswith("['baton-sandbox', 'websockets']") and "site-packages" in output


def test_the_package_installs_from_a_git_repository(tmp_path: Path) -> None:
    repository, target = tmp_path / "repository", tmp_path / "target"
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    shutil.copytree(PACKAGE, repository / "clients" / "python", ignore=ignored)
    git = ["git", "-C", repository, "-c", "user.name=test", "-c", "user.email=test@example.com"]
    run(*git, "init", "--quiet")
    run(*git, "add", "--all")
    run(*git, "commit", "--quiet", "--message", "test")
    source = f"git+file://{repository}#subdirectory=clients/python"
    run(*PIP, "install", "--no-deps", "--no-build-isolation", "--target", target, source)
    code = "import baton_sandbox; print(baton_sandbox.__file__)"
    assert run(sys.executable, "-c", code, cwd="/", env={**os.environ, "PYTHONPATH": str(target)}).startswith(str(target))


def test_every_example_is_known() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(EXAMPLE_OUTPUT)


def interpreter(version: str) -> Optional[str]:
    """An interpreter of this version, if this machine has one."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for found in [shutil.which(f"python{version}"), *versions.glob(f"{version}.*/bin/python")]:
        code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        asked = found and subprocess.run([found, "-c", code], capture_output=True, text=True, timeout=20, check=False)
        if asked and asked.stdout.strip() == version:
            return str(found)
    return None


def test_the_oldest_python_parses_every_file() -> None:
    assert 'requires-python = ">=3.9"' in (PACKAGE / "pyproject.toml").read_text()
    files = [*PACKAGE.glob("src/**/*.py"), *EXAMPLES.glob("*.py")]
    assert len(files) > 15
    for file in files:
        ast.parse(file.read_text(), str(file), feature_version=(3, 9))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_supported_python_runs_it(version: str, wheel: Path, testbed: Testbed, tmp_path: Path) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"this machine has no Python {version}")
    python, address = environment(found, wheel, tmp_path), address_of(testbed)
    for name in ("basic", "reconnect"):
        output = run(python, "-W", "error", EXAMPLES / f"{name}.py", env={**os.environ, "BATON_URL": address}, cwd="/")
        assert EXAMPLE_OUTPUT[name] in output


@pytest.mark.parametrize("name", sorted(EXAMPLE_OUTPUT))
def test_an_example_runs(name: str, python: Path, testbed: Testbed) -> None:
    output = run(python, EXAMPLES / f"{name}.py", env={**os.environ, "BATON_URL": address_of(testbed)}, cwd="/")
    assert EXAMPLE_OUTPUT[name] in output


def test_every_block_of_the_readmes_is_a_program_with_its_output() -> None:
    assert len(README_BLOCKS) == 7
    assert all(README_ADDRESS in code and output for code, output in README_BLOCKS)


@pytest.mark.parametrize("number", range(len(README_BLOCKS)))
def test_a_block_of_the_readmes_prints_what_is_shown(number: int, python: Path, testbed: Testbed, tmp_path: Path) -> None:
    code, shown = README_BLOCKS[number]
    output = run(python, "-W", "error", "-c", code.replace(README_ADDRESS, address_of(testbed)), cwd=tmp_path)
    # `…` stands for what differs from run to run.
    assert re.fullmatch(".+".join(map(re.escape, shown.strip().split("…"))), output.strip()), f"{output}\nshown:\n{shown}"
