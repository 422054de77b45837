"""Chat templates: the environment that authors expect, and the limits that hostile ones meet."""

import time
from typing import Any

import pytest

from mlxhost.frontend.errors import BadRequest, CardError
from mlxhost.frontend.text import template as module
from mlxhost.frontend.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "<hi> é"}, {"role": "assistant", "content": "b"}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, **variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("{% for m in messages %}\n  {% if loop.first %}\nA\n  {% endif %}\n{% endfor %}", "A\n"),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "b!"),
        ("{{ messages[0].content ~ 1 ~ 'x' }}", "<hi> é1x"),
        ("{{ 'ab' * 3 }}{{ 2 ** 3 }}{{ 1 + 2 }}", "ababab83"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) }}{{ m(2) }}", "[1][2]"),
        (
            "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}",
            "2",
        ),
        (
            "{% for m in messages %}{{ m.role }}{% if not loop.last %},{% endif %}{% endfor %}",
            "user,assistant",
        ),
        ("{{ undefined_thing }}|{{ flag }}", "|on"),
    ],
)
def test_environment_is_what_authors_expect(source: str, text: str) -> None:
    """Whitespace control, loop controls, tojson, the generation tag and operators behave as published."""
    assert render(source, flag="on") == text


def test_strftime_now_formats_the_present() -> None:
    """strftime_now gives today's date."""
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_refusal_of_the_template_reaches_the_client() -> None:
    """raise_exception becomes a 400 with the template's own words."""
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 'a' * 100000000 }}",
        "{{ 10 ** 100000 }}",
        "{{ 9999999 ** 60 }}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    ],
)
def test_hostile_templates_fail_as_the_request(source: str) -> None:
    """Escapes from the sandbox, mutation and unbounded growth end in a 400, quickly."""
    start = time.monotonic()
    with pytest.raises(BadRequest):
        render(source)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)
def test_endless_templates_meet_the_deadline(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops and recursion without output stop at the time limit."""
    monkeypatch.setattr(module, "MAX_RENDER_S", 0.2)
    start = time.monotonic()
    with pytest.raises(BadRequest, match=r"longer than 0\.2 s"):
        render(source)
    assert time.monotonic() - start < 2


def test_output_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt over the size limit is refused while it is being made."""
    monkeypatch.setattr(module, "MAX_TEXT_CHARS", 1000)
    with pytest.raises(BadRequest, match="too large"):
        render("{% for i in range(10000) %}abc{% endfor %}")


@pytest.mark.parametrize(
    "source", ["{% if %}", "{% for m in messages %}", "{{ x | nofilter }}", "x" * (1 << 21)]
)
def test_templates_that_cannot_be_used_are_the_models_fault(source: str) -> None:
    """A source that does not compile, or is huge, is a CardError."""
    with pytest.raises(CardError):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "iterates", "tests"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", False, False),
        (
            "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}",
            True,
            False,
        ),
        (
            "{% for m in messages %}{% if m.content is string %}{% endif %}"
            "{% for p in m.content %}{% endfor %}{% endfor %}",
            True,
            True,
        ),
        (
            "{% for m in messages %}{% for p in m.content | list %}{{ p.text }}{% endfor %}{% endfor %}",
            True,
            False,
        ),
    ],
)
def test_the_form_of_content_is_read_from_the_source(source: str, iterates: bool, tests: bool) -> None:
    """Whether a template loops over content parts, and whether it also takes strings, is seen."""
    template = ChatTemplate(source, {})
    assert (template.iterates_content, template.tests_for_string) == (iterates, tests)


QWEN_LIKE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == 'user' %}{%- set ns.last = index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {% generation %}
        {{- '<|im_start|>assistant\\n' ~ message.content.split('</think>')[-1] }}
        {% endgeneration %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- call.function.arguments | tojson }}
            {%- endfor %}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }} last={{ ns.last }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@pytest.mark.slow
@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_rendering_equals_transformers(generation_prompt: bool) -> None:
    """The same source, messages and variables give the text that transformers gives."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "system", "content": "Be <brief> & «clear»."},
        {"role": "user", "content": "Wetter in Köln?"},
        {
            "role": "assistant",
            "content": "<think>hm</think>Moment.",
            "tool_calls": [{"function": {"name": "w", "arguments": {"z": "Köln", "a": [1, None, True]}}}],
        },
        {"role": "user", "content": "Danke\n"},
    ]
    theirs, _ = render_jinja_template(
        [messages], chat_template=QWEN_LIKE, add_generation_prompt=generation_prompt, eos_token="<|im_end|>"
    )
    ours = ChatTemplate(QWEN_LIKE, {"eos_token": "<|im_end|>"}).render(
        messages, add_generation_prompt=generation_prompt
    )
    assert ours == theirs[0]
