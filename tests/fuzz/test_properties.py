"""Properties of the codec and of merging, for any message."""

import contextlib
from typing import Any

import msgspec
import pytest
from fuzz.mutations import golden
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct, inspect

from mlxhost.wire import control, data
from mlxhost.wire.codec import decode, encode
from mlxhost.wire.errors import DecodeError
from mlxhost.worker.merge import merge

U32 = st.integers(0, (1 << 32) - 1)
INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    match kind:
        case inspect.IntType():
            return INTEGERS
        case inspect.FloatType():
            return st.floats()
        case inspect.BoolType():
            return st.booleans()
        case inspect.StrType():
            return st.text(max_size=8)
        case inspect.NoneType():
            return st.none()
        case inspect.AnyType():
            return JSON
        case inspect.UnionType():
            return st.one_of([values(t) for t in kind.types])
        case inspect.ListType():
            return st.lists(values(kind.item_type), max_size=3)
        case inspect.TupleType():
            return st.tuples(*[values(t) for t in kind.item_types])
        case inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=2)
        case inspect.StructType():
            return st.builds(kind.cls, **{f.name: values(f.type) for f in kind.fields})
    raise NotImplementedError(f"no strategy for {kind}")


def message_of(kinds: tuple[type[Struct], ...]) -> st.SearchStrategy[Struct]:
    return st.one_of([values(inspect.type_info(kind)) for kind in kinds])


ANY = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])


@ANY
@given(message=message_of(data.MESSAGES), binary=st.lists(st.binary(max_size=40), max_size=3))
def test_data_messages_come_back_as_they_were(message: Struct, binary: list[bytes]) -> None:
    """Any data message and its binary frames survive the wire."""
    _survives(message, binary)


@ANY
@given(message=message_of(control.MESSAGES))
def test_control_messages_come_back_as_they_were(message: Struct) -> None:
    """Any control message survives the wire."""
    _survives(message, [])


def _survives(message: Struct, binary: list[bytes]) -> None:
    try:
        frames = encode(message, *binary)
    except (
        OverflowError,
        UnicodeEncodeError,
    ):  # beyond 64 bits, or half a surrogate pair: not in MessagePack
        return
    decoded, extra = decode(frames)
    assert msgspec.msgpack.encode(decoded) == msgspec.msgpack.encode(message)  # equal even for NaN
    assert list(extra) == binary


@ANY
@given(frames=st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_are_a_message_or_a_decode_error(frames: list[bytes]) -> None:
    """Nothing else comes out of the decoder."""
    with contextlib.suppress(DecodeError):
        decode(frames)


@ANY
@given(st.data())
def test_any_cut_of_a_real_message_is_a_message_or_a_decode_error(draw: st.DataObject) -> None:
    """A real message, cut short or with bytes changed anywhere, never raises anything else; an ADD whose
    header is whole still names its handle."""
    frames = draw.draw(st.sampled_from(golden()))
    at = draw.draw(st.integers(0, 1))
    frame = bytearray(frames[at])
    for _ in range(draw.draw(st.integers(0, 3))):
        frame[draw.draw(st.integers(0, len(frame) - 1))] = draw.draw(st.integers(0, 255))
    frames[at] = bytes(frame[: draw.draw(st.integers(0, len(frame)))])
    told = outcome(frames)
    if told is not None and at == 1 and frames[0] == golden()[0][0]:
        assert (told.tag, told.handle, told.request_id) == ("add", 7, "req-1")


def outcome(frames: list[bytes]) -> DecodeError | None:
    """The error of a message that cannot be decoded."""
    try:
        decode(frames)
    except DecodeError as error:
        return error
    return None


DATA_SAMPLES = [
    frames for frames in golden() if msgspec.msgpack.decode(frames[0])[0] in ("add", "acc", "out", "rej")
]


@given(frames=st.sampled_from(DATA_SAMPLES), more=st.lists(st.integers() | st.text() | st.none(), max_size=4))
def test_newer_and_older_arrays_follow_the_rule(frames: list[bytes], more: list[Any]) -> None:
    """More elements at the end change nothing; fewer mean defaults, down to the required ones."""
    message = decode(frames)[0]
    body = msgspec.msgpack.decode(frames[1])
    more = [v for v in more if not isinstance(v, int) or -(1 << 63) <= v < 1 << 64]
    assert decode([frames[0], msgspec.msgpack.encode(body + more)])[0] == message
    fields = msgspec.structs.fields(type(message))
    required = sum(field.required for field in fields)
    for count in range(len(fields)):
        shorter = [frames[0], msgspec.msgpack.encode(body[: 1 + count])]
        if count < required:
            with pytest.raises(DecodeError):
                decode(shorter)
        else:
            rest = [msgspec.structs.asdict(decode(shorter)[0])[f.name] for f in fields[count:]]
            defaults = [
                f.default if f.default_factory is msgspec.NODEFAULT else f.default_factory()
                for f in fields[count:]
            ]
            assert rest == defaults


@st.composite
def outs(draw: st.DrawFn) -> list[data.Out]:
    """OUTs of one worker, each row's tokens told in order, none after its end."""
    rows, made, ended = draw(st.integers(1, 5)), [], set[int]()
    for step in range(draw(st.integers(2, 8))):
        handles = [h for h in range(rows) if h not in ended and draw(st.booleans())]
        counts = [draw(st.integers(0, 3)) for _ in handles]
        finish = [draw(st.sampled_from([0, 0, 0, 1, 2, 4])) for _ in handles]
        ended |= {h for h, f in zip(handles, finish, strict=True) if f}
        told = any(finish)
        made.append(
            data.Out(
                1,
                step,
                data.Load(tick=step),
                handles,
                counts,
                draw(st.lists(U32, min_size=sum(counts), max_size=sum(counts))),
                finish,
                detail=[f"{h}@{step}" if f else "" for h, f in zip(handles, finish, strict=True)]
                if told
                else [],
                completion_tokens=[h + step for h in handles] if told else [],
            )
        )
    return made


def told(outs: list[data.Out]) -> dict[int, tuple[list[int], int, str]]:
    """What a reader of these OUTs knows of each row."""
    rows: dict[int, tuple[list[int], int, str]] = {}
    for out in outs:
        at = 0
        for i, (handle, count) in enumerate(zip(out.handles, out.counts, strict=True)):
            tokens, _, _ = rows.get(handle, ([], 0, ""))
            detail = out.detail[i] if out.detail else ""
            rows[handle] = tokens + out.tokens[at : at + count], out.finish[i], detail
            at += count
    return rows


@given(outs=outs(), cut=st.integers(1, 7))
def test_merged_outs_say_the_same(outs: list[data.Out], cut: int) -> None:
    """However many OUTs are merged before they are sent, each row's tokens, end and reason are the same, the
    merged one is well formed and carries the newest load."""
    merged = outs[0]
    sent = []
    for i, out in enumerate(outs[1:], start=1):
        if i == cut:
            sent.append(merged)
            merged = out
        else:
            merged = merge(merged, out)
    sent.append(merged)
    assert told(sent) == told(outs)
    for out in sent:
        assert len(set(out.handles)) == len(out.handles) == len(out.counts) == len(out.finish)
        assert sum(out.counts) == len(out.tokens)
        assert all(len(c) in (0, len(out.handles)) for c in (out.detail, out.completion_tokens))
    assert sent[-1].load == outs[-1].load
