"""Chat templates: a model's Jinja source, run as untrusted code.

The environment matches the one that model authors test against (trim_blocks, lstrip_blocks, loop controls,
the `generation` tag, `tojson` without HTML escapes, `raise_exception`, `strftime_now`) and is sandboxed.
A thread cannot be stopped from outside, so the source is changed before it is compiled: each loop and macro
first checks a deadline, and operators that can grow a value are checked against a size.
"""

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxhost.frontend.errors import BadRequest, CardError

MAX_SOURCE_CHARS = 1 << 20
MAX_TEXT_CHARS = 64 << 20  # a prompt cannot sensibly pass the largest request body by much
MAX_RENDER_S = 10.0
MAX_POWER = 1 << 16

_TICK = "_mlxhost_tick"


class TemplateRefused(Exception):
    """The template called raise_exception: it does not accept these messages."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is plain."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with deadline checks compiled in and growth limited."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for concat in list(tree.find_all(nodes.Concat)):
            _concat_to_add(concat)
        blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
            *tree.find_all(nodes.For),
            *tree.find_all(nodes.Macro),
            *tree.find_all(nodes.CallBlock),
        ]
        for block in blocks:
            tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(tick).set_lineno(block.lineno))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not (isinstance(left, int | float) and isinstance(right, int | float)) or (
                abs(right) > 64 or abs(left) > MAX_POWER
            ):
                raise jinja2.TemplateRuntimeError("the power is too large")
        elif operator == "*":
            sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if hasattr(sized, "__len__") and isinstance(times, int) and len(sized) * times > MAX_TEXT_CHARS:
                raise jinja2.TemplateRuntimeError("the repeated value is too large")
        elif isinstance(left, str) and isinstance(right, str) and len(left) + len(right) > MAX_TEXT_CHARS:
            raise jinja2.TemplateRuntimeError("the joined text is too large")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled chat template.

    Raises CardError when the source does not compile or is too large.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise CardError(f"the chat template has {len(source)} characters; {MAX_SOURCE_CHARS} are allowed")
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise CardError(f"the chat template does not compile: line {error.lineno}: {error}") from None
        except RecursionError:
            raise CardError("the chat template does not compile: it is nested too deeply") from None
        self._special_tokens = special_tokens
        self.knows_developer = "developer" in source
        self.iterates_content = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
        self.tests_for_string = any(
            test.name == "string" and _is_content(test.node) for test in tree.find_all(nodes.Test)
        )

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The prompt's text. Raises BadRequest when the template refuses the messages, fails or takes
        longer than MAX_RENDER_S."""
        tick, size, parts = _deadline(MAX_RENDER_S), 0, []
        try:
            values = self._special_tokens | variables | {"messages": messages, _TICK: tick}
            for part in self._template.generate(values):
                size += len(part)
                if size > MAX_TEXT_CHARS:
                    raise jinja2.TemplateRuntimeError("the prompt is too large")
                parts.append(part)
        except TemplateRefused as error:
            raise BadRequest(f"the model's chat template refused: {error}", param="messages") from None
        except Exception as error:  # whatever a template's expressions can raise is the request's failure
            raise BadRequest(
                f"the model's chat template failed on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from None
        return "".join(parts)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _deadline(seconds: float) -> Callable[[], str]:
    """A function to call often; it raises once `seconds` have gone by."""
    end = time.monotonic() + seconds

    def tick() -> str:
        if time.monotonic() > end:
            raise jinja2.TemplateRuntimeError(f"it ran longer than {seconds:g} s")
        return ""

    return tick


def _raise_exception(message: str) -> None:
    raise TemplateRefused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys, which prompts must not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _concat_to_add(concat: nodes.Concat) -> None:
    """Turn `a ~ b ~ c` into additions of strings, which are intercepted; `~` itself is not."""
    strings: Iterator[nodes.Expr] = (
        nodes.Filter(part, "string", [], [], None, None, lineno=concat.lineno) for part in concat.nodes
    )
    total = next(strings)
    for string in strings:
        total = nodes.Add(total, string, lineno=concat.lineno)
    concat.nodes = [total]


def _is_content(node: nodes.Node) -> bool:
    """Whether an expression reads some message's `content`."""
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and (
        isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )
