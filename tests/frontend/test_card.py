"""A model's files as the card lists them."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.frontend_models import CHAT_TEMPLATE, write_model

from mlxhost.frontend.errors import CardError
from mlxhost.frontend.text.card import CardFiles, Defaults
from mlxhost.frontend.text.model import load_text_model
from mlxhost.wire.control import ModelCard
from mlxhost.worker.card import model_card


def card(directory: Path, **options: Any) -> ModelCard:
    return model_card(write_model(directory, **options))


@pytest.mark.parametrize(
    ("options", "source"),
    [
        ({}, CHAT_TEMPLATE),
        ({"chat_template": None}, None),
        ({"chat_template": "config", "jinja": "file"}, "file"),
        (
            {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]},
            "D",
        ),
        ({"chat_template": [{"name": "rag", "template": "R"}]}, "R"),
    ],
)
def test_chat_template_is_found(tmp_path: Path, options: dict[str, Any], source: str | None) -> None:
    """chat_template.jinja beats the config; of several templates the one named default is used."""
    assert CardFiles(card(tmp_path / "m", **options)).chat_template() == source


def test_special_tokens_come_in_both_spellings(tmp_path: Path) -> None:
    """A special token may be a string or an object with content; null means that there is none."""
    found = CardFiles(
        card(tmp_path / "m", bos_token={"content": "<s>", "special": True}, eos_token="</s>", pad_token=None)
    ).special_tokens()
    assert found == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_file_changed_after_loading_is_refused(tmp_path: Path) -> None:
    """A tokenizer other than the worker's would give garbage: an error names the file."""
    made = card(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(CardError, match=r"tokenizer\.json changed"):
        load_text_model(made)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json"),
        ("tokenizer_config.json", '{"chat_template": 5}', r"tokenizer_config\.json.*chat_template"),
        ("generation_config.json", '{"temperature": "hot"}', r"generation_config\.json.*temperature"),
        ("tokenizer_config.json", "[" * 100_000, r"tokenizer_config\.json"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, match: str) -> None:
    """A file that cannot be used is named in the error, with the field where there is one."""
    directory = write_model(tmp_path / "m")
    (directory / name).write_text(content)
    with pytest.raises(CardError, match=match):
        load_text_model(model_card(directory))


def test_template_that_does_not_compile_leaves_completions(tmp_path: Path) -> None:
    """A bad chat template is kept as the error to answer chats with; the tokenizer still works."""
    text = load_text_model(card(tmp_path / "m", chat_template="{% if %}"))
    assert isinstance(text.template, CardError)
    assert text.tokenizer.encode("hello").ids


def test_truncation_and_padding_of_the_file_are_undone(tmp_path: Path) -> None:
    """A tokenizer.json saved with truncation must not cut prompts."""
    directory = write_model(tmp_path / "m")
    saved = json.loads((directory / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (directory / "tokenizer.json").write_text(json.dumps(saved))
    text = load_text_model(model_card(directory))
    assert text.tokenizer.decode(text.tokenizer.encode("hello world, dog").ids) == "hello world, dog"


def test_the_fleets_sampling_defaults_come_before_the_models_own() -> None:
    """What the fleet says replaces a default, a greedy one too; what it does not say stays."""
    own = Defaults(do_sample=False, temperature=0.6, top_k=20)
    assert own.overlaid({"temperature": 0.2, "top_p": 0.9}) == Defaults(None, 0.2, 0.9, 20)
    assert own.overlaid({}) == own
    assert own.overlaid({"top_k": 3.0}) == Defaults(None, 0.6, None, 3)
