"""The index against the plain definition of a longest usable prefix."""

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxhost.worker.cache.index import Kind, Match, Needs, Node, PrefixIndex, common_tokens
from mlxhost.worker.cache.keys import BLOCK_TOKENS, child_key, root_key, token_bytes

ROOT = root_key("model", "scheme")


def record(
    index: PrefixIndex, tokens: Sequence[int], kinds: Sequence[Kind] = (Kind.KV,), root: bytes = ROOT
) -> list[Node]:
    """Put in `tokens` as whole blocks and a tail."""
    nodes, key = [], root
    for start in range(0, len(tokens), BLOCK_TOKENS):
        node = index.add(key, start, token_bytes(tokens[start : start + BLOCK_TOKENS]))
        for kind in kinds:
            if kind not in node.records:
                index.put(node, kind, 100)
        nodes.append(node)
        key = node.key
    return nodes


def match(index: PrefixIndex, tokens: Sequence[int], root: bytes = ROOT) -> Match:
    return index.match(root, token_bytes(tokens))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Sequences that share beginnings of random lengths, and one to look up."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, 6))):
        base = rng.choice(sequences) if sequences and rng.random() < 0.8 else []
        kept = base[: rng.randrange(len(base) + 1)]
        sequences.append(kept + [rng.randrange(3) for _ in range(rng.randrange(1, 700))])
    looked_up = rng.choice(sequences)
    cut = looked_up[: rng.randrange(len(looked_up) + 1)]
    return sequences, cut + [rng.randrange(3) for _ in range(rng.randrange(600))]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(conversations())
@settings(max_examples=60, deadline=None)
def test_growing_layers_match_the_longest_common_prefix(case: tuple[list[list[int]], list[int]]) -> None:
    """Whatever was recorded, the match is the longest prefix in common with any of it."""
    sequences, wanted = case
    index = PrefixIndex(Needs())
    for sequence in sequences:
        record(index, sequence)
    found = match(index, wanted)
    assert found.position == max(common(s, wanted) for s in sequences)
    joined = b"".join(node.tokens for node in found.nodes)
    assert joined[: found.position * 4] == token_bytes(wanted)[: found.position * 4]


@given(conversations(), st.integers(1, 700))
@settings(max_examples=60, deadline=None)
def test_windows_are_covered_by_what_was_recorded(
    case: tuple[list[list[int]], list[int]], window: int
) -> None:
    """A match never reaches beyond what the rotating records of its own nodes hold."""
    sequences, wanted = case
    index = PrefixIndex(Needs((window,)))
    for i, sequence in enumerate(sequences):
        record(index, sequence, (Kind.KV, Kind.ROTATING) if i % 2 == 0 else (Kind.KV,))
    found = match(index, wanted)
    held = set()
    for node in found.nodes:
        if Kind.ROTATING in node.records:
            held |= set(range(max(node.start, node.stop - window), node.stop))
    assert set(range(max(0, found.position - window), found.position)) <= held


@given(conversations())
@settings(max_examples=60, deadline=None)
def test_states_match_only_where_one_was_taken(case: tuple[list[list[int]], list[int]]) -> None:
    """With recurrent layers a match ends exactly where a sequence with a checkpoint ended."""
    sequences, wanted = case
    index = PrefixIndex(Needs(stateful=True))
    for sequence in sequences:
        nodes = record(index, sequence)
        if Kind.STATE not in nodes[-1].records:
            index.put(nodes[-1], Kind.STATE, 100)
    ends = [len(s) for s in sequences if wanted[: len(s)] == s]
    assert match(index, wanted).position == max(ends, default=0)


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=80))
def test_common_tokens_counts_whole_tokens(a: list[int], b: list[int]) -> None:
    """Comparing bytes gives what comparing ids gives."""
    assert common_tokens(token_bytes(a), token_bytes(b)) == common(a, b)


def test_another_salt_model_or_adapter_shares_nothing() -> None:
    """Each part of the root keeps its prefixes to itself."""
    index = PrefixIndex(Needs())
    tokens = list(range(600))
    record(index, tokens)
    others = [
        root_key("model", "scheme", salt="tenant"),
        root_key("other", "scheme"),
        root_key("model", "other"),
        root_key("model", "scheme", adapters=["a"]),
        root_key("model", "scheme", media=["a"]),
    ]
    assert len({ROOT, *others}) == 6
    assert [match(index, tokens, root).position for root in others] == [0] * 5


def test_a_lost_block_cuts_the_chain_and_its_return_mends_it() -> None:
    """Blocks behind a missing one wait until it is there again."""
    index = PrefixIndex(Needs())
    tokens = list(range(1000))
    nodes = record(index, tokens)
    assert match(index, tokens).position == 1000
    index.discard(nodes[1].records[Kind.KV])
    assert match(index, tokens).position == 256
    record(index, tokens[:512])
    assert match(index, tokens).position == 1000


def test_a_node_whose_first_record_went_before_its_second_came_is_known() -> None:
    """RAM too small for a node's records: one leaves while the next is put there, and both can go."""
    index = PrefixIndex(Needs(windows=(512,)))
    node = index.add(ROOT, 0, token_bytes(range(BLOCK_TOKENS)))
    index.discard(index.put(node, Kind.KV, 1))
    second = index.put(node, Kind.ROTATING, 1)
    assert list(index.nodes.values()) == [node] == index.children(ROOT)
    index.discard(second)
    assert (len(index), index.children(ROOT), index.tokens) == (0, [], 0)


def test_counts_follow_what_is_held() -> None:
    """Tokens and nodes go back to nothing when every record is discarded."""
    index = PrefixIndex(Needs((4,)))
    nodes = record(index, list(range(700)), (Kind.KV, Kind.ROTATING))
    assert (index.tokens, len(index)) == (700, 3)
    for node in nodes:
        for held in list(node.records.values()):
            index.discard(held)
            index.discard(held)  # a second time changes nothing
    assert (index.tokens, len(index), index.children(ROOT)) == (0, 0, [])


def test_the_longest_durable_prefix_ends_before_the_first_gap() -> None:
    """Only blocks whose ancestors are all on disk count."""
    index = PrefixIndex(Needs())
    nodes = record(index, list(range(1000)))
    for node in nodes:
        node.records[Kind.KV].on_disk = True
    assert index.longest() == 1000
    nodes[2].records[Kind.KV].on_disk = False
    assert index.longest() == 512


def test_a_key_follows_from_parent_and_tokens() -> None:
    """Neither order nor cut can give two prefixes one key."""
    keys = {
        child_key(ROOT, token_bytes([1, 2])),
        child_key(ROOT, token_bytes([2, 1])),
        child_key(child_key(ROOT, token_bytes([1])), token_bytes([2])),
    }
    assert len(keys) == 3
