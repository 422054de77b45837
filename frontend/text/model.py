"""The text side of a served model: tokenizer, chat template, defaults; loaded once per model card."""

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from mlxhost.frontend import logs
from mlxhost.frontend.errors import ApiError, CardError
from mlxhost.frontend.text.card import CardFiles, Defaults
from mlxhost.frontend.text.detokenizer import PieceTable
from mlxhost.frontend.text.store import CardStore
from mlxhost.frontend.text.template import ChatTemplate
from mlxhost.wire.control import ModelCard


@dataclass(frozen=True)
class TextModel:
    """Everything between text and token ids for one model.

    `template` is None when the model has none, and the error that it raised when it has a bad one (the
    model still completes plain prompts).
    """

    tokenizer: Tokenizer
    pieces: PieceTable
    template: ChatTemplate | CardError | None
    defaults: Defaults
    vocab_size: int
    eos_ids: frozenset[int]


def load_text_model(card: ModelCard, store: Path | None = None) -> TextModel:
    """Read a card's files, those not in its directory from `store`. Raises CardError naming the file that
    cannot be used. Takes up to a second for a large vocabulary, so never call it on the event loop."""
    files = CardFiles(card, store)
    try:
        tokenizer = Tokenizer.from_buffer(files.need("tokenizer.json"))
    except CardError:
        raise
    except Exception as error:  # tokenizers raises bare exceptions
        raise CardError(f"{card.directory}/tokenizer.json: {error}") from None
    # Files saved after training may cut or pad every prompt to a fixed length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    template: ChatTemplate | CardError | None = None
    if (source := files.chat_template()) is not None:
        try:
            template = ChatTemplate(source, files.special_tokens())
        except CardError as error:
            template = error
    return TextModel(
        tokenizer=tokenizer,
        pieces=PieceTable(tokenizer, files.decoder()),
        template=template,
        defaults=files.defaults(),
        vocab_size=card.vocab_size or tokenizer.get_vocab_size(),
        eos_ids=frozenset(card.eos_ids),
    )


class TextModels:
    """Text models by card key, loaded in a thread, each once; replicas and aliases share theirs."""

    def __init__(self, executor: Executor, store: CardStore | None = None) -> None:
        self._executor, self._store = executor, store
        self._loading: dict[str, asyncio.Task[TextModel]] = {}
        self._running: set[asyncio.Task[TextModel]] = set()  # a loop holds its tasks weakly

    async def get(self, card: ModelCard) -> TextModel:
        """The text model of `card`. Raises CardError when its files cannot be used."""
        return await asyncio.shield(self._start(card))

    def keep(self, cards: list[ModelCard]) -> None:
        """Start loading the cards that are new, so that the first request need not wait, and forget those
        that are gone."""
        live = {card.key for card in cards}
        for key in self._loading.keys() - live:
            del self._loading[key]
        for card in cards:
            self._start(card)

    def _start(self, card: ModelCard) -> asyncio.Task[TextModel]:
        task = self._loading.get(card.key)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(self._load(card))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            task.add_done_callback(_log_failure)
            self._loading[card.key] = task
        return task

    async def _load(self, card: ModelCard) -> TextModel:
        store = None
        if self._store is not None:
            await self._store.ensure(card)
            store = self._store.directory
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, load_text_model, card, store)


def _log_failure(future: asyncio.Future[TextModel]) -> None:
    if not future.cancelled() and isinstance(error := future.exception(), Exception):
        reason = error.message if isinstance(error, ApiError) else repr(error)
        logs.warning("text_model_failed", reason=reason)
