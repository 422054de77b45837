"""What a model card's files say to a frontend, read and checked.

Values of the wrong type are refused here, with the file and the field, so that no later code meets them.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from mlxhost.frontend.errors import CardError
from mlxhost.frontend.text.store import file_name, matches, read_regular
from mlxhost.wire.control import ModelCard

T = TypeVar("T")

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Defaults(Struct, frozen=True):
    """Sampling defaults of generation_config.json; None where it says nothing."""

    do_sample: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None

    def overlaid(self, own: Mapping[str, float]) -> "Defaults":
        """These, with what the fleet says of the model in their place."""
        if not own:
            return self
        values = msgspec.structs.asdict(self) | {"do_sample": None} | dict(own)
        return msgspec.convert(values, Defaults, strict=False)  # the wire carries a whole number as 3.0


class _NamedTemplate(Struct):
    name: str
    template: str


class TokenizerConfig(Struct):
    """The part of tokenizer_config.json that matters here."""

    chat_template: str | list[_NamedTemplate] | None = None


class _TokenizerFile(Struct):
    """The part of tokenizer.json that `tokenizers` does not give back."""

    decoder: dict[str, Any] | None = None


class CardFiles:
    """The files of one card, from its directory or else from the store of fetched files. Content that is no
    longer what the worker saw is an error."""

    def __init__(self, card: ModelCard, store: Path | None = None) -> None:
        self._directory, self._store = Path(card.directory), store
        self._expected = {f.name: f.sha256 for f in card.files}

    def read(self, name: str) -> bytes | None:
        """Content of a file, None when the card lists none of that name. Raises CardError."""
        expected = self._expected.get(name)
        if expected is None:
            return None
        path = self._directory / name
        if self._store and (kept := matches(file_name(self._store, expected), expected)) is not None:
            return kept
        try:
            data = read_regular(path)
        except OSError as error:
            raise CardError(f"{path}: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != expected:
            raise CardError(f"{path} changed after the model was loaded; reload the model")
        return data

    def need(self, name: str) -> bytes:
        """Like `read`, for a file that must be there."""
        data = self.read(name)
        if data is None:
            raise CardError(f"{self._directory / name}: no such file, and the model cannot be served without")
        return data

    def defaults(self) -> Defaults:
        """generation_config.json."""
        return self._decode("generation_config.json", Defaults)

    def decoder(self) -> dict[str, Any] | None:
        """The `decoder` section of tokenizer.json."""
        return self._decode("tokenizer.json", _TokenizerFile).decoder

    def chat_template(self) -> str | None:
        """Jinja source: chat_template.jinja, else the config's (of several, the one named default)."""
        if (source := self.read("chat_template.jinja")) is not None:
            try:
                return source.decode()
            except UnicodeDecodeError as error:
                raise CardError(f"{self._directory / 'chat_template.jinja'}: not UTF-8 ({error})") from None
        template = self._decode("tokenizer_config.json", TokenizerConfig).chat_template
        if isinstance(template, list):
            named = {t.name: t.template for t in template}
            return named.get("default") or next(iter(named.values()), None)
        return template

    def special_tokens(self) -> dict[str, str]:
        """bos_token and its like, by name: tokenizer_config.json beats special_tokens_map.json."""
        found: dict[str, str] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            config = self._decode(name, dict[str, Any])
            found |= {k: text for k in _SPECIAL_TOKENS if (text := _token_text(config.get(k))) is not None}
        return found

    def _decode(self, name: str, kind: type[T]) -> T:
        data = self.read(name)
        try:
            return msgspec.json.decode(b"{}" if data is None else data, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CardError(f"{self._directory / name}: {error}") from None


def _token_text(value: object) -> str | None:
    """A special token is written as a string or as {"content": string, ...}."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
