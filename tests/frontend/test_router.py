"""What a request says and what earlier ones did decide before the policy does, as tables."""

import pytest

from mlxhost.frontend import affinity
from mlxhost.frontend.affinity import BLOCK_TOKENS, PrefixIndex, Sessions, block_hashes, rendezvous
from mlxhost.frontend.errors import BadRequest, ReplicaNotReady
from mlxhost.frontend.hints import ANYWHERE, Hints, hints_of
from mlxhost.frontend.replica import Replica
from mlxhost.frontend.router import Router
from mlxhost.frontend.routing import BOUND_FLOOR
from mlxhost.wire.control import Fleet, FleetFrontend, FleetModel, FleetReplica
from mlxhost.wire.data import Load

BLOCK = BLOCK_TOKENS * 4  # bytes


class Made:
    """A router over `size` replicas that are ready and connected."""

    def __init__(self, size: int, routing: str = "round-robin", *, frontends: int = 1, ordinal: int = 0):
        self.router = Router(ordinal)
        self.size, self.routing, self.frontends = size, routing, frontends
        self.replicas = [Replica((f"m/{i}", 1), "m", connected=True) for i in range(size)]
        self.states = ["ready"] * size
        self.publish()

    @property
    def model(self) -> FleetModel:
        listed = [FleetReplica(r.key[0], i, r.key[1], self.states[i]) for i, r in enumerate(self.replicas)]
        return FleetModel("m", [], listed, self.routing)

    def publish(self) -> None:
        frontends = [FleetFrontend(f"frontend/{i}", 1, "x") for i in range(self.frontends)]
        self.router.update(Fleet(1, frontends, [self.model]), {r.key: r for r in self.replicas})

    def respawn(self, position: int) -> None:
        slot, epoch = self.replicas[position].key
        self.replicas[position] = Replica((slot, epoch + 1), "m", connected=True)
        self.publish()

    def send(self, hints: Hints = ANYWHERE, prompt: bytes = b"") -> int | None:
        replica = self.router.choose(self.model, hints, prompt)
        if replica is None:
            return None
        replica.seq += 1
        replica.add_pending(replica.seq, 1)
        self.router.sent(self.model, replica, hints, prompt)
        return replica.position

    def finish_all(self) -> None:
        for replica in self.replicas:
            replica.take_load(Load(last_seq=replica.seq))


def prompt(*blocks: int) -> bytes:
    return b"".join(bytes([b]) * BLOCK for b in blocks)


@pytest.mark.parametrize(
    ("headers", "session", "room", "expected"),
    [
        ({}, None, None, ANYWHERE),
        ({"x-mlxhost-replica": "3"}, None, None, Hints(replica=3)),
        ({"x-mlxhost-replicas": "4-7"}, None, None, Hints(first=4, last=7)),
        ({"x-mlxhost-session": "h"}, None, None, Hints(session="h")),
        ({"x-mlxhost-session": "h"}, "b", None, Hints(session="b")),
        ({}, None, 12, Hints(room=12)),
    ],
)
def test_hints(headers: dict[str, str], session: str | None, room: int | None, expected: Hints) -> None:
    """Headers and body fields become hints; the body's session comes first."""
    assert hints_of(headers, session=session, room=room) == expected


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-mlxhost-replica", "x"),
        ("x-mlxhost-replica", "-1"),
        ("x-mlxhost-replica", ""),
        ("x-mlxhost-replica", "٣"),
        ("x-mlxhost-replicas", "4"),
        ("x-mlxhost-replicas", "7-4"),
        ("x-mlxhost-replicas", "1-"),
    ],
)
def test_bad_hints(header: str, value: str) -> None:
    """A header that is not what it must be is a 400 that names it."""
    with pytest.raises(BadRequest, match=header) as caught:
        hints_of({header: value}, session=None, room=None)
    assert caught.value.param == header


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        (Hints(replica=2), [2, 2, 2]),
        (Hints(room=6), [2, 2, 2]),
        (Hints(first=1, last=2), [1, 2, 1]),
        (Hints(first=1, last=2, room=3), [2, 2, 2]),
        (Hints(first=3, last=3), [3, 3, 3]),
    ],
)
def test_where_requests_ask_to_go(hints: Hints, expected: list[int]) -> None:
    """A pinned replica, room % replicas and a contiguous subset are honoured under any policy."""
    made = Made(4)
    assert [made.send(hints) for _ in expected] == expected


@pytest.mark.parametrize(
    ("hints", "param"),
    [
        (Hints(replica=4), "x-mlxhost-replica"),
        (Hints(replica=0, first=1, last=2), "x-mlxhost-replica"),
        (Hints(first=2, last=4), "x-mlxhost-replicas"),
        (Hints(first=9, last=9), "x-mlxhost-replicas"),
    ],
)
def test_replicas_that_do_not_exist(hints: Hints, param: str) -> None:
    """An index out of range is a 400, asked before or at the dispatch."""
    made = Made(4)
    for ask in (lambda: made.router.can_route(made.model, hints), lambda: made.send(hints)):
        with pytest.raises(BadRequest) as caught:
            ask()
        assert caught.value.param == param


def test_bootstrap_room_is_required_where_it_routes() -> None:
    """With the bootstrap-room policy a request without a room is a 400; with one, it decides."""
    made = Made(4, "bootstrap-room")
    assert [made.send(Hints(room=room)) for room in (0, 5, 7, 2**62)] == [0, 1, 3, 0]
    with pytest.raises(BadRequest, match="bootstrap_room"):
        made.send()


def test_a_pinned_replica_that_is_not_ready_is_said() -> None:
    """No other replica takes a pinned request: 503 with the state, or a wait for the data link."""
    made = Made(2)
    made.states[1] = "draining"
    made.publish()
    with pytest.raises(ReplicaNotReady, match=r"Replica 1 .* draining"):
        made.router.can_route(made.model, Hints(replica=1))
    made.states[1] = "ready"
    made.publish()
    made.replicas[1].set_state(connected=False)
    assert not made.router.can_route(made.model, Hints(replica=1))
    assert made.send(Hints(replica=1)) is None


def test_a_session_stays_until_its_replica_is_overloaded_or_dies() -> None:
    """Requests of a session share a replica; it moves when that one has too much, and when it is gone."""
    made = Made(3)
    session = Hints(session="s")
    home = made.send(session)
    assert home is not None
    assert {made.send(session) for _ in range(BOUND_FLOOR - 1)} == {home}
    moved = made.send(session)
    assert moved not in (home, None)
    made.finish_all()
    assert made.send(session) == moved
    assert moved is not None
    made.respawn(moved)
    chosen = [made.send(session) for _ in range(2)]
    assert chosen[0] == chosen[1]


def test_sessions_draining_replicas_take_nothing_new() -> None:
    """A session whose replica drains goes elsewhere, and stays there."""
    made = Made(2)
    home = made.send(Hints(session="s"))
    assert home is not None
    made.states[home] = "draining"
    made.publish()
    assert [made.send(Hints(session="s")) for _ in range(2)] == [1 - home] * 2


def test_frontends_agree_on_new_sessions() -> None:
    """With several frontends each sends a new session to the same replica, and sessions spread."""
    ours, theirs = Made(8, frontends=2), Made(8, frontends=2, ordinal=1)
    homes = []
    for number in range(64):
        hints = Hints(session=f"s{number}")
        homes.append(ours.send(hints))
        assert theirs.send(hints) == homes[-1]
        ours.finish_all()
        theirs.finish_all()
    assert set(homes) == set(range(8))


def test_rendezvous_moves_only_what_it_must() -> None:
    """When a replica closes, sessions of the others stay where they were."""
    columns = Made(8).router.columns("m")
    before = {f"s{i}": rendezvous(f"s{i}", columns.open, 0, 8) for i in range(100)}
    columns.set_usable(3, False)
    for session, home in before.items():
        after = rendezvous(session, columns.open, 0, 8)
        assert after == home if home != 3 else after != 3
    assert rendezvous("s", columns.open, 3, 4) is None


def test_turns_begin_elsewhere_in_each_frontend() -> None:
    """Frontends that know nothing of one another do not all begin with replica 0."""
    firsts = [Made(8, frontends=4, ordinal=n).send() for n in range(4)]
    assert firsts == [0, 2, 4, 6]


def test_prefix_affinity_follows_the_longest_prefix() -> None:
    """The replica that was sent the longest shared prefix is chosen, block by block."""
    made = Made(3, "prefix-affinity")
    a, b, c = prompt(1, 2, 3), prompt(1, 9), prompt(7)
    first, second, third = (made.send(prompt=p) for p in (a, b, c))
    # b shares a block with a, so it went along; c shares none.
    assert first == second != third
    made.finish_all()
    assert made.send(prompt=prompt(1, 2, 3, 4)) == first
    assert made.send(prompt=prompt(7, 7)) == third
    assert made.send(prompt=c[: BLOCK - 4]) not in (None, first, third)  # less than a block: by load


def test_a_hot_prefix_spreads() -> None:
    """A hundred requests with one prefix never put more than the bound on one replica."""
    made = Made(4, "prefix-affinity")
    counts = [0] * 4
    for _ in range(100):
        position = made.send(prompt=prompt(1, 2))
        assert position is not None
        counts[position] += 1
        mean = sum(counts) / 4
        assert max(counts) <= max(BOUND_FLOOR, 1.25 * (mean + 0.25))
    assert min(counts) > 0


def test_prefixes_of_a_dead_process_are_forgotten() -> None:
    """A respawned replica has an empty cache: nothing is sent to it for its predecessor's sake."""
    made = Made(2, "prefix-affinity")
    home = made.send(prompt=prompt(1, 2))
    made.finish_all()
    assert home is not None
    assert made.send(prompt=prompt(1, 2)) == home
    made.finish_all()
    made.respawn(home)
    assert made.send(prompt=prompt(1, 2)) == 1 - home


def test_an_unusable_holder_gives_way_to_a_shorter_prefix() -> None:
    """While the replica with the longest prefix drains, the one with the next longest is chosen."""
    made = Made(3, "prefix-affinity")
    index = PrefixIndex()
    index.record(block_hashes(prompt(1)), 2)
    index.record(block_hashes(prompt(1, 2, 3)), 0)
    hashes = block_hashes(prompt(1, 2, 3, 4))
    assert index.longest(hashes, lambda p: True) == [0]
    assert index.longest(hashes, lambda p: p != 0) == [2]
    assert index.longest(hashes, lambda p: False) == []
    index.forget(0)
    assert index.longest(hashes, lambda p: True) == [2]
    assert len(index) == 1
    assert made.send(prompt=b"") is not None


def test_blocks_are_chained() -> None:
    """A block's hash tells of everything before it; a tail shorter than a block does not count."""
    assert block_hashes(prompt(1, 2))[0] == block_hashes(prompt(1, 3))[0]
    assert block_hashes(prompt(1, 2))[1] != block_hashes(prompt(3, 2))[1]
    assert block_hashes(prompt(1) + b"\0" * (BLOCK - 4)) == block_hashes(prompt(1))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, holders of a block, blocks of a prompt and sessions all have a limit; the oldest go first."""
    monkeypatch.setattr(affinity, "MAX_ENTRIES", 10)
    monkeypatch.setattr(affinity, "MAX_HOLDERS", 2)
    monkeypatch.setattr(affinity, "MAX_BLOCKS", 4)
    monkeypatch.setattr(affinity, "MAX_SESSIONS", 3)
    index = PrefixIndex()
    for position in range(5):
        index.record(block_hashes(prompt(1)), position)
    assert index.longest(block_hashes(prompt(1)), lambda p: True) == [3, 4]
    for number in range(20):
        index.record(block_hashes(prompt(100 + number, *range(8))), 0)
        assert len(index) <= 10
    assert index.longest(block_hashes(prompt(1)), lambda p: True) == []
    sessions = Sessions()
    for number in range(5):
        sessions.bind(f"s{number}", number)
    assert [sessions.find(f"s{n}") for n in range(5)] == [None, None, 2, 3, 4]
    sessions.forget(3)
    assert (sessions.find("s3"), len(sessions)) == (None, 2)
