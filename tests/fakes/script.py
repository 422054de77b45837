"""What the fake worker is told to do: the JSON in $MLXHOST_FAKE."""

import os
from typing import Any

import msgspec

from mlxhost.wire.boot import Boot


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """What a control operation gets: NEWS first, then the REPLY after `delay_s`; `mode` is the heartbeat's
    from then on."""

    result: dict[str, Any] = {}
    code: str = "ok"
    message: str = ""
    news: list[str] = []
    delay_s: float = 0.0
    mode: str | None = None


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """What the fake does. Counts are of tokens emitted by the process."""

    load_s: float = 0.0  # time spent loading, with PROGRESS
    silent_load: bool = False  # load without PROGRESS
    boot_error: list[str] | None = None  # [code, message]: DEAD, then exit 1
    boot_exit: int | None = None  # exit with this code instead of READY, saying nothing
    hello_token: str | None = None  # a wrong join token
    hello_protocol: list[int] | None = None
    answer: list[int] | None = None  # ids to emit instead of the prompt's
    length: int | None = None  # ids to emit (the answer repeats); default: all of the answer, once
    step_ms: float = 1.0
    accept_ms: float = 0.0  # wait before ACCEPTED
    max_rows: int = 8
    max_queued: int = 16
    kv_capacity: int = 100_000
    max_model_len: int = 8192
    reject: list[Any] | None = None  # [code, message, retry_after_s]
    only_epoch: int | None = None
    die_after: int | None = None  # SIGKILL itself
    abort_after: int | None = None  # DEAD with reason, then exit 1
    silent_after: int | None = None  # no more OUT, heartbeats go on
    freeze_after: int | None = None  # stop answering anything, alive
    malformed_after: int | None = None  # send a broken OUT once, go on
    flood: int = 0  # OUTs beside each real one: foreign handles, columns that disagree, a REJECT, garbage
    duplicate_terminal: bool = False
    wrong_epoch: bool = False  # every OUT carries a foreign epoch
    late_reply_s: float = 0.0  # delay of every REPLY
    row_error: str | None = None  # end each row with Finish.ERROR after its first token
    flush_result: dict[str, Any] = {}
    answers: dict[str, Answer] = {}  # by operation
    prefill_s: float = 0.0  # before a row's first token; the tick advances meanwhile
    hang_up_after: int | None = None  # close the control connection, go on serving
    resident_bytes: int = 20_000_000  # what it says of its memory in READY
    grammar_error: str = ""  # why every row with a grammar is refused
    grammar_warning: str = ""  # what of every grammar cannot be enforced


def load_script(boot: Boot) -> Script:
    raw = msgspec.json.decode(os.environ.get("MLXHOST_FAKE", "{}"), type=dict[str, Any])
    for key in (boot.slot, boot.model):
        if key in raw:
            return msgspec.convert(raw[key], Script)
    return msgspec.convert(raw, Script) if set(raw) <= set(Script.__struct_fields__) else Script()
