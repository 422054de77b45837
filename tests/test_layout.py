"""The shape of the project: packages, arrows between them, and what each may import."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("frontend", "supervisor", "wire", "worker")
HEAVY = {"mlx", "torch", "transformers", "mlx_lm"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def modules() -> list[Path]:
    return [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]


def test_every_package_is_listed_for_the_wheel() -> None:
    """A folder with an __init__.py that pyproject does not list would be missing from the wheel."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(settings["tool"]["setuptools"]["packages"])
    found = {
        "mlxhost." + ".".join(init.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for init in (ROOT / package).rglob("__init__.py")
    }
    assert listed == found


def test_type_checkers_see_every_package() -> None:
    """.typing/mlxhost links to each package's folder."""
    for package in PACKAGES:
        assert (ROOT / ".typing" / "mlxhost" / package).resolve() == ROOT / package


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    """wire imports none of the others; the others import wire and never each other; only workers use mlx."""
    package = path.relative_to(ROOT).parts[0]
    allowed = {package, "wire"}
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "mlxhost":
            assert parts[1] in allowed, f"{path} imports {name}"
        if parts[0] in HEAVY:
            assert package == "worker", f"{path} imports {name}"


@pytest.mark.parametrize("module", ["mlxhost.frontend.main", "mlxhost.supervisor.cli", "mlxhost.worker.main"])
def test_processes_stay_lean(module: str) -> None:
    """Importing a process's entry point loads neither torch nor transformers, and mlx in workers only."""
    code = f"import {module}, sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "transformers", "mlx_lm"}
    if module == "mlxhost.worker.main":
        assert "numpy" not in loaded
        assert "asyncio" not in loaded
    else:
        assert "mlx" not in loaded


def test_top_level_holds_only_what_belongs_there() -> None:
    """Nothing is tracked at the top level beyond the agreed folders and files."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\n")
    top = {line.split("/")[0] for line in tracked if line and not line.startswith(".")}
    allowed = {*PACKAGES, "tests", "deploy", "bench", "docs", "README.md", "LICENSE", "CHANGELOG.md"}
    assert top <= allowed | {"pyproject.toml", "Makefile"}
