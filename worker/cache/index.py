"""Which prefixes are known, and the longest one that a new request can start from. No I/O, no MLX.

A tree of nodes under one root for each salt. A node is a span of tokens: a full block of 256, or a tail of
fewer, which ends where a prompt or an answer ended. A node's parent is always a full block or the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mlxhost.worker.cache.keys import BLOCK_TOKENS, TOKEN_BYTES, child_key

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
_MAX_SIBLINGS = 64  # children of one node that are compared with a prompt, the latest first


class Kind(StrEnum):
    """What a record holds of its span."""

    KV = "kv"  # growing layers: keys and values of every token
    ROTATING = "rotating"  # sliding windows: the last tokens, as many as the window has
    STATE = "state"  # recurrent layers: the state after the last token


@dataclass(slots=True, eq=False)
class Record:
    """One kind's share of a node. `arrays` is there while it is in RAM."""

    node: "Node"
    kind: Kind
    nbytes: int
    arrays: Any = None
    on_disk: bool = False
    writing: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """Tokens [start, stop) of some prefix; `tokens` are their ids as bytes."""

    key: bytes
    parent: bytes
    start: int
    tokens: bytes
    records: dict[Kind, Record] = field(default_factory=dict)
    pins: int = 0  # sessions and saved rows that want it kept
    holds: int = 0  # rows that are being restored from it

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Needs:
    """What restoring takes beside the KV of growing layers."""

    windows: Sequence[int] = ()  # sizes of sliding windows
    stateful: bool = False


@dataclass(frozen=True)
class Match:
    """A prefix to start from: the first `position` tokens of `nodes`, a chain from the root. `known` tokens
    of the prompt have been seen in whole blocks, whether or not they can be restored."""

    position: int = 0
    nodes: tuple[Node, ...] = ()
    known: int = 0


class PrefixIndex:
    """All nodes by key. Nodes whose parent is not known are kept: they count once it appears."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.nodes: dict[bytes, Node] = {}
        self.tokens = 0  # of nodes with a KV record
        self._children: dict[bytes, dict[bytes, Node]] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def find(self, parent: bytes, tokens: bytes) -> Node | None:
        """The node of `tokens` after `parent`, if it is known."""
        return self.nodes.get(child_key(parent, tokens))

    def add(self, parent: bytes, start: int, tokens: bytes) -> Node:
        """The node of `tokens` after `parent`, new if need be."""
        key = child_key(parent, tokens)
        node = self.nodes.get(key)
        if node is None:
            node = Node(key, parent, start, tokens)
            self._know(node)
        return node

    def put(self, node: Node, kind: Kind, nbytes: int) -> Record:
        """A record of `node`, which had none of the kind. A node that went with its last record is back."""
        if node.key not in self.nodes:
            self._know(node)
        record = node.records[kind] = Record(node, kind, nbytes)
        if kind is Kind.KV:
            self.tokens += node.length
        return record

    def discard(self, record: Record) -> None:
        """Forget a record, and its node with the last one."""
        node = record.node
        if node.records.get(record.kind) is not record:
            return
        del node.records[record.kind]
        if record.kind is Kind.KV:
            self.tokens -= node.length
        if not node.records:
            del self.nodes[node.key]
            siblings = self._children[node.parent]
            del siblings[node.key]
            if not siblings:
                del self._children[node.parent]

    def _know(self, node: Node) -> None:
        self.nodes[node.key] = node
        self._children.setdefault(node.parent, {})[node.key] = node

    def children(self, key: bytes) -> list[Node]:
        """Known continuations of a node or root."""
        return list(self._children.get(key, {}).values())

    def chain(self, node: Node) -> list[Node]:
        """`node` and its known ancestors, the root's child first."""
        found = [node]
        while (parent := self.nodes.get(found[-1].parent)) is not None:
            found.append(parent)
        return found[::-1]

    def blocks(self, root: bytes, sequence: bytes) -> list[Node]:
        """The longest chain of known full blocks that `sequence` begins with."""
        found: list[Node] = []
        key = root
        for at in range(0, len(sequence) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            key = child_key(key, sequence[at : at + _BLOCK_BYTES])
            node = self.nodes.get(key)
            if node is None or Kind.KV not in node.records:
                break
            found.append(node)
        return found

    def match(self, root: bytes, sequence: bytes) -> Match:
        """The longest prefix of `sequence` (token ids as bytes) whose records are all there."""
        path = self.blocks(root, sequence)
        known = len(path) * BLOCK_TOKENS
        for depth in range(len(path), -1, -1):
            above = path[:depth]
            rest = sequence[depth * _BLOCK_BYTES :]
            for take, child in self._continuations(above[-1].key if above else root, rest):
                position = depth * BLOCK_TOKENS + take
                if self._usable(position, [*above, child]):
                    return Match(position, (*above, child), known)
            if above and self._usable(depth * BLOCK_TOKENS, above):
                return Match(depth * BLOCK_TOKENS, tuple(above), known)
        return Match(known=known)

    def longest(self) -> int:
        """Tokens of the longest prefix that is on disk from its first token to its last."""
        best, settled = 0, set()
        for node in sorted(self.nodes.values(), key=lambda n: n.start):
            record = node.records.get(Kind.KV)
            if record and record.on_disk and (node.start == 0 or node.parent in settled):
                settled.add(node.key)
                best = max(best, node.stop)
        return best

    def _continuations(self, parent: bytes, rest: bytes) -> list[tuple[int, Node]]:
        """(common tokens, child) of children that begin as `rest` does, the longest first."""
        found = []
        for child in list(reversed(self._children.get(parent, {}).values()))[:_MAX_SIBLINGS]:
            take = common_tokens(child.tokens, rest)
            if take and (take == child.length or not self.needs.stateful):
                found.append((take, child))
        return sorted(found, key=lambda pair: -pair[0])

    def _usable(self, position: int, nodes: Sequence[Node]) -> bool:
        """Whether the records of `nodes` hold all of the caches after `position` tokens."""
        last = nodes[-1]
        if Kind.KV not in last.records:
            return False
        if self.needs.stateful and (position != last.stop or Kind.STATE not in last.records):
            return False
        return all(_covered(position, nodes, window) for window in self.needs.windows)


def _covered(position: int, nodes: Sequence[Node], window: int) -> bool:
    """Whether rotating records hold the `window` tokens before `position`."""
    oldest = max(0, position - window)
    for node in reversed(nodes):
        if node.stop <= oldest:
            break
        if Kind.ROTATING not in node.records or max(node.start, node.stop - window) > max(oldest, node.start):
            return False
    return True


def common_tokens(a: bytes, b: bytes) -> int:
    """How many tokens two sequences begin with alike."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // TOKEN_BYTES
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        return 0
    differ = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)
