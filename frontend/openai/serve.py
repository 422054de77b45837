"""The common way of chat completions and completions: a checked request in, an answer out."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from aiohttp import web

from mlxhost.frontend import logs
from mlxhost.frontend.errors import ApiError, InternalError, InvalidGrammar, ModelNotReady
from mlxhost.frontend.generation import Choice, Ending, Generation, Piece
from mlxhost.frontend.hints import hints_of
from mlxhost.frontend.http.access import client_of
from mlxhost.frontend.http.body import read_body
from mlxhost.frontend.http.context import log_key, services_of, trace_of
from mlxhost.frontend.http.early import open_stream, resident
from mlxhost.frontend.http.sse import DONE, EventStream, event
from mlxhost.frontend.models import max_model_len
from mlxhost.frontend.openai.constraints import Constraint, warning_header
from mlxhost.frontend.openai.errors import error_object
from mlxhost.frontend.openai.format import Answer, Format, Whole
from mlxhost.frontend.openai.plan import check_stop_ids, row_specs
from mlxhost.frontend.openai.requests import GenerationRequest
from mlxhost.frontend.openai.unsupported import refuse_unsupported
from mlxhost.frontend.rows import Call, Row, RowSpec
from mlxhost.frontend.services import Services
from mlxhost.frontend.text.model import TextModel
from mlxhost.wire.control import FleetModel

# How often a request may find its model unloaded again before it is told so.
MAX_WAITS = 5

RequestT = TypeVar("RequestT", bound=GenerationRequest)


@dataclass(frozen=True)
class Prepared(Generic[RequestT]):
    """A request whose body is understood and whose model can serve it."""

    http: web.Request
    services: Services
    body: RequestT
    model: FleetModel
    text: TextModel
    max_model_len: int


@dataclass(frozen=True)
class Prompt:
    """One prompt to answer n times: its ids, how long an answer may be, what to repeat before it."""

    ids: Sequence[int]
    max_tokens: int
    echo: str = ""


async def prepare(http: web.Request, kind: type[RequestT]) -> Prepared[RequestT]:
    """Read the body and find its model. Raises the typed error of whatever is wrong with either."""
    services = services_of(http)
    body = await read_body(http, kind, services.max_body_bytes)
    http[log_key].model = body.model
    refuse_unsupported(body)
    model = await resident(http, services, body.model, stream=bool(body.stream))
    if model.card is None:
        raise InternalError(f"The model {model.name!r} is ready but has told nothing about its tokenizer")
    text = await services.texts.get(model.card)
    check_stop_ids(body, text.vocab_size)
    # A model that was unloaded again meanwhile is waited for once more; its length is what it had.
    length = services.table.max_model_len(model) or max_model_len(model)
    return Prepared(http, services, body, model, text, length)


async def serve(
    prepared: Prepared[RequestT],
    prompts: Sequence[Prompt],
    ending: Ending,
    kind: type[Format],
    constraint: Constraint | None = None,
    *,
    warning: str = "",
) -> web.StreamResponse:
    """Run the rows and answer, streaming or not, with `warning` in the headers. Raises ApiError as long as no
    header is sent."""
    services, body, http = prepared.services, prepared.body, prepared.http
    log = http[log_key]
    log.prompt_tokens = sum(len(p.ids) for p in prompts)
    specs = row_specs(
        body,
        prepared.text.defaults.overlaid(prepared.model.sampling_defaults),
        [(p.ids, p.max_tokens) for p in prompts],
        request_id=log.request_id,
        client=client_of(http, body.user),
        trace=trace_of(http),
        hints=hints_of(
            http.headers, session=body.session_id or body.prompt_cache_key, room=body.bootstrap_room
        ),
        grammar=constraint.grammar if constraint is not None else None,
    )
    call = await _start(prepared, specs)
    choices = [Choice(row, prepared.text.pieces, ending) for row in call.rows]
    generation = Generation(services.dispatcher, call, choices, [len(p.ids) for p in prompts])
    answer = kind(
        Answer(
            id=kind.prefix + secrets.token_hex(12),
            created=int(time.time()),
            model=prepared.model.name,
            token_ids=bool(body.return_token_ids),
            prompt_ids=[p.ids for p in prompts],
            echoes=[p.echo for p in prompts],
            n=body.n or 1,
        )
    )
    try:
        await generation.accepted()
        # One choice may be admitted before the others; what it is told holds for all.
        if unenforced := next((row.warning for row in call.rows if row.warning), ""):
            warning = f"not enforced: {unenforced}"
        headers = warning_header(warning)
        if not body.stream:
            return await _whole(generation, answer, headers)
        options = body.stream_options
        return await _stream(prepared, generation, answer, bool(options and options.include_usage), headers)
    except InvalidGrammar as error:
        raise InvalidGrammar(error.message, param=constraint.param if constraint else None) from None
    finally:
        generation.close()
        log.completion_tokens = generation.usage().completion


async def _start(prepared: Prepared[RequestT], specs: Sequence[RowSpec]) -> Call:
    """Send the rows. A model that was unloaded since it was found is waited for again."""
    services, name = prepared.services, prepared.model.name
    for _ in range(MAX_WAITS):
        try:
            return await services.dispatcher.start(name, specs)
        except ModelNotReady:
            await resident(prepared.http, services, name, stream=bool(prepared.body.stream))
    return await services.dispatcher.start(name, specs)


def _sink(generation: Generation, answer: Format, stream: EventStream) -> Callable[[Row, list[int]], bool]:
    """Takes tokens as they arrive while the client keeps up; the handler sleeps meanwhile."""

    def push(row: Row, ids: list[int]) -> bool:
        if not stream.keeps_up:
            return False
        if events := answer.delta(row.index, generation.push(row, ids)):
            row.shown = True
            stream.push(events)
        return True

    return push


def _shown(generation: Generation, answer: Format, pieces: Sequence[Piece]) -> bytes:
    """The events of what is new. What a client has seen of a row cannot be taken back."""
    parts = []
    for piece in pieces:
        if events := answer.piece(piece):
            generation.call.rows[piece.index].shown = True
            parts.append(events)
    return b"".join(parts)


async def _whole(generation: Generation, answer: Format, headers: Mapping[str, str]) -> web.Response:
    texts: list[list[str]] = [[] for _ in generation.choices]
    ids: list[list[int]] = [[] for _ in generation.choices]
    async for pieces in generation.pieces():
        for piece in pieces:
            if piece.anew:
                texts[piece.index], ids[piece.index] = [], []
            texts[piece.index].append(piece.text)
            ids[piece.index] += piece.ids
    wholes = [
        Whole("".join(texts[c.index]), ids[c.index], c.reason)
        for c in generation.choices
        if c.reason is not None
    ]
    body = answer.whole(wholes, generation.usage())
    return web.Response(body=body, content_type="application/json", headers=headers)


async def _stream(
    prepared: Prepared[RequestT],
    generation: Generation,
    answer: Format,
    include_usage: bool,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    stream = await open_stream(prepared.http, prepared.services, headers)
    try:
        await stream.send(answer.opening())
        if not prepared.body.return_token_ids:
            generation.call.sink = _sink(generation, answer, stream)
        async for pieces in generation.pieces():
            await stream.send(_shown(generation, answer, pieces))
    except ConnectionError:  # the client is gone
        raise
    except Exception as error:  # the status line is out: all that is left is to say it in the stream
        failed = error if isinstance(error, ApiError) else InternalError("the answer failed")
        if failed is not error:
            logs.exception("stream_failed", request_id=prepared.http[log_key].request_id)
        prepared.http[log_key].note = failed.code or failed.kind
        await stream.send(event(msgspec.json.encode({"error": error_object(failed)})))
        return await stream.close(broken=True)
    await stream.send((answer.usage(generation.usage()) if include_usage else b"") + DONE)
    return await stream.close()
