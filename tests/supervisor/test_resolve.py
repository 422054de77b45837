"""From specifications to models on disk."""

from pathlib import Path

import pytest

from mlxhost.supervisor.config.apikeys import KeyOptions, read_key
from mlxhost.supervisor.errors import ConfigError, ModelError
from mlxhost.supervisor.modelspec import Spec, parse
from mlxhost.supervisor.resolve import fetch_embedded, locate


def test_a_directory_is_named_after_itself(tiny_models: dict[str, Path]) -> None:
    """Name: the directory's; alias: its full path."""
    (model,) = locate([Spec(str(tiny_models["llama"]), replicas=2)])
    assert (model.name, model.replicas) == ("tiny-llama", 2)
    assert model.path == tiny_models["llama"].resolve()
    assert model.aliases == (str(model.path),)


def test_a_given_name_keeps_the_directory_name_as_alias(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths work, too, and `.` is named after the directory it is."""
    monkeypatch.chdir(tiny_models["llama"])
    (model,) = locate([Spec(".", "mine")])
    assert (model.name, model.aliases[0]) == ("mine", "tiny-llama")


def test_a_gguf_file_is_named_after_its_stem(tmp_path: Path) -> None:
    """x.gguf is called x."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (model,) = locate([Spec(str(tmp_path / "x.gguf"))])
    assert (model.name, model.path) == ("x", tmp_path / "x.gguf")


def test_a_hub_id_is_found_in_the_local_cache(
    tmp_path: Path, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """owner/name resolves to its snapshot; it answers to its name and its full id."""
    repo = tmp_path / "models--owner--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / "abc123").symlink_to(tiny_models["llama"])
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (model,) = locate([Spec("owner/tiny")])
    assert model.name == "tiny"
    assert "owner/tiny" in model.aliases


def test_embedded_models_are_fetched_only_after_every_check() -> None:
    """A wrong path beside `demo` fails before anything is fetched; then demo's path is what fetch gives."""
    specs = parse(["demo,/nonexistent/model"])
    with pytest.raises(ModelError, match="/nonexistent does not exist"):
        locate(specs)
    specs = parse(["small=demo:2"])
    (model,) = fetch_embedded(locate(specs), specs, lambda name, label: Path(f"/{name}/{label}.gguf"))
    assert (model.name, model.path, model.replicas) == ("small", Path("/demo/small.gguf"), 2)
    assert "demo" in model.aliases


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("dem", "did you mean demo?"),
        ("owner/name", "`hf download owner/name`"),
        ("./tiny-lama", "no such file or directory; did you mean tiny-llama?"),
        ("tiny-lama", "did you mean tiny-llama?"),
        ("/nonexistent/x", "/nonexistent does not exist"),
    ],
)
def test_an_unknown_name_says_what_is_near(
    source: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message shows the way out."""
    (tmp_path / "tiny-llama").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        locate([Spec(source)])
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("/" + "x" * 5_000, r"x\.\.\.' cannot be looked at: File name too long"),
        ("/a\0b", "cannot be looked at: embedded null byte"),
        ("~nobody-of-this-name/x", "not found: .*/~nobody-of-this-name does not exist"),
    ],
    ids=["long", "null", "no such user"],
)
def test_what_cannot_be_a_path_is_a_clear_error(source: str, why: str) -> None:
    """Neither a flag nor a file of the configuration that is read again may end in a traceback."""
    with pytest.raises(ModelError, match=why):
        locate(parse([source]))


def test_a_key_file_that_cannot_be_a_path_is_a_clear_error(tmp_path: Path) -> None:
    """The same for [keys.NAME]."""
    for file in ("a\0b", "~nobody-of-this-name/x", "x" * 5_000):
        with pytest.raises(ConfigError, match=r"is no path|cannot be read"):
            read_key("k", KeyOptions(file=file), tmp_path, {})
