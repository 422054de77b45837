"""Messages to prompt text."""

from dataclasses import replace
from typing import Any

import pytest
from support.frontend_models import write_model

from mlxhost.frontend.errors import BadRequest
from mlxhost.frontend.text.model import TextModel, load_text_model
from mlxhost.frontend.text.prompts import Conversation, cut_after_final_message, encode_chat, render_chat
from mlxhost.frontend.text.template import ChatTemplate
from mlxhost.worker.card import model_card

STRINGS = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
PARTS = "{% for m in messages %}[{% for p in m.content %}<{{ p.text }}>{% endfor %}]{% endfor %}"
BOTH = (
    "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}]{% endfor %}"
)
TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(model_card(write_model(tmp_path_factory.mktemp("prompts") / "m")))


def with_template(text: TextModel, source: str) -> TextModel:
    return replace(text, template=ChatTemplate(source, {}))


@pytest.mark.parametrize(
    ("source", "content", "shown"),
    [
        (STRINGS, "a", "[user:a]"),
        (STRINGS, TWO_PARTS, "[user:a\nb]"),
        (STRINGS, None, "[user:]"),
        (PARTS, "a", "[<a>]"),
        (PARTS, TWO_PARTS, "[<a><b>]"),
        (BOTH, "a", "[a]"),
        (BOTH, TWO_PARTS, "[<a><b>]"),
    ],
)
def test_content_comes_in_the_form_the_template_reads(
    text: TextModel, source: str, content: Any, shown: str
) -> None:
    """Parts are joined for templates that want strings, strings wrapped for those that want parts."""
    talk = Conversation([{"role": "user", "content": content}])
    assert render_chat(with_template(text, source), talk) == shown


@pytest.mark.parametrize(
    ("source", "role"), [(STRINGS, "system"), (STRINGS + "{# developer #}", "developer")]
)
def test_developer_is_system_to_templates_that_do_not_know_it(
    text: TextModel, source: str, role: str
) -> None:
    """The developer role keeps its name only where the template mentions it."""
    talk = Conversation([{"role": "developer", "content": "x"}])
    assert render_chat(with_template(text, source), talk).startswith(f"[{role}:")


def test_generation_prompt_and_variables_reach_the_template(text: TextModel) -> None:
    """add_generation_prompt and chat_template_kwargs are template variables."""
    source = "{{ add_generation_prompt }} {{ enable_thinking }} {{ tools is none }}"
    talk = Conversation([{"role": "user", "content": "x"}], variables={"enable_thinking": False})
    assert render_chat(with_template(text, source), talk) == "True False True"


def test_continued_message_stays_open(text: TextModel) -> None:
    """continue_final_message ends the prompt with the last message's own text."""
    talk = Conversation(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}],
        continue_final_message=True,
    )
    assert render_chat(text, talk).endswith("<|im_start|>assistant\nWell, ")


@pytest.mark.parametrize(
    ("rendered", "final", "kept"),
    [
        ("u:a A:well END", "well", "u:a A:well"),
        ("A:well END", " well \n", "A:well"),
        ("A:well  END", "well ", "A:well "),
        ("well A:well END", "well", "well A:well"),
    ],
)
def test_cut_is_made_after_the_last_occurrence(rendered: str, final: str, kept: str) -> None:
    """The last place where the message stands counts; spaces the template trimmed are not looked for."""
    assert cut_after_final_message(rendered, final) == kept


@pytest.mark.parametrize("final", ["", "  ", "absent"])
def test_a_message_the_template_hides_cannot_be_continued(final: str) -> None:
    """Nothing to continue is a 400."""
    with pytest.raises(BadRequest, match="continue_final_message"):
        cut_after_final_message("A: END", final)


def test_no_template_is_a_client_error(text: TextModel) -> None:
    """A base model refuses chats and says what to use instead."""
    with pytest.raises(BadRequest, match="no chat template; use /v1/completions"):
        render_chat(replace(text, template=None), Conversation([{"role": "user", "content": "x"}]))


def test_special_tokens_written_by_the_template_become_single_ids(text: TextModel) -> None:
    """<|im_start|> in the rendered prompt is one token, and none is added around the prompt."""
    ids = encode_chat(text, Conversation([{"role": "user", "content": "x"}]))
    assert ids[0] == text.tokenizer.token_to_id("<|im_start|>")
    assert text.tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
