"""Fixtures shared by every test: tiny models, built once a session."""

from pathlib import Path

import pytest

from mlxhost.worker.models.architecture import install_seam

install_seam()  # before any test imports an architecture of mlx-lm by itself


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of one tiny model of each family (see tiny_models), and of a 4-bit llama."""
    from support.tiny_models import FAMILIES, build

    base = tmp_path_factory.mktemp("tiny")
    made = {family: build(family, base / f"tiny-{family}") for family in FAMILIES}
    made["llama-4bit"] = build("llama", base / "tiny-llama-4bit", bits=4)
    return made
