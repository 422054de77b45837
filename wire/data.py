"""Data-plane messages: frontend <-> worker, one socket in each frontend.

Every struct here is an append-only array: a field may be added at the end (readers ignore trailing
fields they do not know), never moved or removed. Token ids of a prompt travel beside the struct as one
little-endian uint32 binary frame (`PROMPT_FRAME`), because decoding a list of 100k ints takes
milliseconds and a view takes none.

A row's key is (frontend, handle). Every ADD gets exactly one terminal message: an OUT whose `finish`
column is not RUNNING for that handle, or a REJECT.
"""

from enum import IntEnum

from msgspec import Struct

PROMPT_FRAME = 0  # index, among the binary frames of an ADD, of the prompt ids


class Finish(IntEnum):
    """Why a row ended. RUNNING means that it goes on."""

    RUNNING = 0
    STOP = 1  # an end-of-sequence or stop id
    LENGTH = 2  # max_tokens, or the context is full
    ABORT = 3  # asked for by the frontend, or the worker is shutting down
    ERROR = 4  # the row failed; `detail` says why
    CANCELLED = 5  # an operator ended it; `detail` says how


class Load(Struct, array_like=True, frozen=True):
    """A worker's load, in every OUT and heartbeat.

    `last_seq` is the newest ADD sequence number of the receiving frontend that these figures include;
    the frontend adds what it dispatched since.
    """

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0  # tokens held by running rows, their reservation included
    kv_capacity: int = 0  # tokens that fit
    cached_tokens: int = 0  # tokens held by the prefix cache
    tokens_per_s: float = 0.0  # generated tokens a second over the last heartbeat interval
    last_seq: int = 0
    tick: int = 0  # advances once per prefill chunk or decode step


class Sampling(Struct, array_like=True, frozen=True):
    """How the next token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # None: the worker picks one
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None


class Limits(Struct, array_like=True, frozen=True):
    """When a row ends. `max_tokens` None means the room that the context leaves."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_ids: list[int] = []  # beside the model's own end-of-sequence ids
    ignore_eos: bool = False
    deadline_s: float | None = None  # seconds from receipt


class Grammar(Struct, array_like=True, frozen=True):
    """A constraint on the output. kind: json_object, json_schema, regex, ebnf, choice (a JSON array of
    strings), structural_tag. `strict`: refuse it when a part of it cannot be enforced."""

    kind: str
    value: str = ""
    strict: bool = False


class Attachment(Struct, array_like=True, frozen=True):
    """A typed piece of input beside the ids (image, audio, embedding); bytes are in binary frame `frame`."""

    kind: str
    position: int
    length: int
    hash: str
    frame: int


class Add(Struct, array_like=True, tag="add"):
    """Run one request. Binary frame 0 holds the prompt ids; `siblings` are the handles of choices 1..n-1,
    which share the prefill of `handle` (choice i samples with seed + i)."""

    handle: int
    seq: int
    request_id: str
    task: str = "generate"  # generate, embed, score
    n: int = 1
    siblings: list[int] = []
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    priority: int = 0  # lower runs first
    client: str = ""  # whose request it is, for fairness
    cache_salt: str = ""
    session_id: str = ""
    adapters: list[str] = []
    grammar: Grammar | None = None
    trace: str = ""  # W3C traceparent
    attachments: list[Attachment] = []


class Accepted(Struct, array_like=True, tag="acc"):
    """The row is admitted (and its grammar compiled); HTTP headers may follow."""

    handle: int
    cached_tokens: int
    max_tokens: int  # after the clamp to the room left
    warning: str = ""  # what of its grammar cannot be enforced


class Abort(Struct, array_like=True, tag="abt"):
    """Stop these rows at the next step. Each still gets its one terminal message."""

    rows: list[tuple[int, str]]  # (handle, reason)


class Out(Struct, array_like=True, tag="out"):
    """All that one step (or several, when the frontend was slow) produced for one frontend, as columns.

    `handles`, `counts` and `finish` have one entry a row; row i's new ids are the next `counts[i]` of
    `tokens`. The columns after `finish` are empty when no row has anything to say in them.
    """

    epoch: int
    step: int
    load: Load
    handles: list[int]
    counts: list[int]
    tokens: list[int]
    finish: list[int]
    detail: list[str] = []
    prompt_tokens: list[int] = []
    completion_tokens: list[int] = []
    cached_tokens: list[int] = []
    logprobs: list[list[float]] = []
    top_logprobs: list[list[list[tuple[int, float]]]] = []
    prompt_logprobs: list[list[list[tuple[int, float]]]] = []
    spec_rounds: list[int] = []
    accepted_drafts: list[int] = []


class Reject(Struct, array_like=True, tag="rej"):
    """The row never ran. `code` is one of the REJECT_* names; retry_after_s only for queue_full, draining
    and sleeping."""

    handle: int
    code: str
    message: str
    retry_after_s: float | None = None


REJECT_BAD_MESSAGE = "bad_message"
REJECT_DUPLICATE = "duplicate_request"
REJECT_QUEUE_FULL = "queue_full"
REJECT_DRAINING = "draining"
REJECT_SLEEPING = "sleeping"
REJECT_CONTEXT = "context_length_exceeded"
REJECT_UNSUPPORTED = "unsupported"
REJECT_INVALID = "invalid_request"
REJECT_GRAMMAR = "invalid_grammar"
REJECT_INTERNAL = "internal"

MESSAGES: tuple[type[Struct], ...] = (Add, Accepted, Abort, Out, Reject)
