"""The tiers: what stays in RAM, what is written when, what a bad disk costs."""

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.records import BLOCK_BYTES, ROOT, block, flush, store, until, value

from mlxhost.worker.cache import store as store_module
from mlxhost.worker.cache.index import Kind, Node
from mlxhost.worker.cache.keys import BLOCK_TOKENS, token_bytes
from mlxhost.worker.cache.store import RecordStore


def files(directory: Path) -> list[Path]:
    return sorted((directory / "model").glob("*.safetensors"))


def test_the_ram_tier_keeps_its_cap_and_the_latest() -> None:
    """Without a disk the least recently used records are gone, the touched one stays."""
    made = store(None, ram_blocks=3)
    nodes = [block(made, i) for i in range(3)]
    made.touch([nodes[0]])
    block(made, 3)
    assert made.ram_bytes <= made.ram_cap
    assert sorted(n.tokens[0] for n in made.index.nodes.values()) == [0, 2, 3]
    assert made.counters.evictions == 1


def test_what_extends_a_prefix_goes_before_the_prefix() -> None:
    """A chain is eaten from its end, so that what is left can be used."""
    made = store(None, ram_blocks=3)
    first = block(made, 1)
    second = block(made, 2, first.key, 256)
    third = block(made, 3, second.key, 512)
    made.touch([first, second, third])
    block(made, 9)
    assert set(made.index.nodes) >= {first.key, second.key}
    assert third.key not in made.index.nodes


def test_pinned_records_outlive_others_up_to_half_the_room() -> None:
    """A pin protects from newer records; beyond half of the tier it protects no more."""
    made = store(None, ram_blocks=4)
    pinned = [block(made, i) for i in range(2)]
    made.pin(pinned, 1)
    for i in range(10, 20):
        block(made, i)
    assert all(n.key in made.index.nodes for n in pinned)
    more = [block(made, i) for i in range(20, 22)]
    made.pin(more, 1)
    for i in range(30, 40):
        block(made, i)
    kept = [n for n in (*pinned, *more) if n.key in made.index.nodes]
    assert len(kept) == 2
    made.pin(pinned + more, -1)
    for i in range(40, 50):
        block(made, i)
    assert not any(n.key in made.index.nodes for n in kept)


def test_an_idle_store_writes_everything_and_another_process_finds_it(tmp_path: Path) -> None:
    """Records are on disk without being asked for, and a new store reads the same values."""
    made = store(tmp_path, ram_blocks=10)
    nodes = [block(made, i) for i in range(5)]
    until(made, lambda: made.missing == 0)
    assert len(files(tmp_path)) == 5
    again = store(tmp_path, ram_blocks=10)
    found = [again.index.nodes[n.key] for n in nodes]
    assert [value(n) for n in found] == [None] * 5
    again.read([n.records[Kind.KV] for n in found])
    until(again, lambda: all(value(n) is not None for n in found))
    assert [value(n) for n in found] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_busy_store_writes_seldom(tmp_path: Path) -> None:
    """While rows run, the time between two writes is a hundred times what a write takes."""
    made = store(tmp_path, ram_blocks=100)
    for i in range(50):
        block(made, i)
    started = time.monotonic()
    until(made, lambda: made.counters.spills >= 2, busy=True)
    first = made.counters.spills
    while time.monotonic() < started + 1.0:
        made.pump(busy=True)
        time.sleep(0.001)
    busy = made.counters.spills
    assert first <= busy < 50
    flush(made)
    assert made.missing == 0


def test_a_full_ram_tier_hands_over_to_the_disk(tmp_path: Path) -> None:
    """What was evicted before it was written is written then, and can be read again."""
    made = store(tmp_path, ram_blocks=2)
    nodes = [block(made, i) for i in range(6)]
    assert made.ram_bytes <= made.ram_cap
    assert made.pending == 6
    flush(made)
    assert (made.missing, made.spill_bytes) == (0, 0)
    assert [value(n) for n in nodes[:4]] == [None] * 4
    made.read([nodes[0].records[Kind.KV]])
    until(made, lambda: value(nodes[0]) is not None)
    assert value(nodes[0]) == 0.0


def test_the_spill_queue_drops_the_oldest_and_never_the_newest(tmp_path: Path) -> None:
    """With RAM and queue full the oldest records are lost, counted, and the others still written."""
    made = store(tmp_path, ram_blocks=2, spills=2)
    nodes = [block(made, i) for i in range(10)]
    assert made.counters.dropped > 0
    assert made.spill_bytes <= made.spill_cap
    kept = [i for i, n in enumerate(nodes) if n.key in made.index.nodes]
    assert kept == list(range(10 - len(kept), 10))
    flush(made)
    assert (made.missing, len(files(tmp_path))) == (0, len(kept))


def test_one_spill_larger_than_the_queue_is_written(tmp_path: Path) -> None:
    """The newest stays whatever its size."""
    made = store(tmp_path, ram_blocks=0.5, spills=0)
    node = block(made, 1)
    flush(made)
    assert node.records[Kind.KV].on_disk


def test_idleness_empties_the_ram_tier_and_nothing_is_lost(tmp_path: Path) -> None:
    """Long after the last request only the disk holds the records."""
    made = store(tmp_path, ram_blocks=10)
    nodes = [block(made, i) for i in range(3)]
    made.demote_after_s = 0.05
    until(made, lambda: made.ram_bytes == 0)
    assert made.counters.demoted == 3
    made.read([nodes[1].records[Kind.KV]])
    until(made, lambda: value(nodes[1]) is not None, busy=True)
    assert value(nodes[1]) == 1.0


def test_release_keeps_what_is_on_disk(tmp_path: Path) -> None:
    """Sleep empties RAM; records that were written come back, the others are forgotten."""
    made = store(tmp_path, ram_blocks=10)
    kept = block(made, 1)
    flush(made)
    lost = block(made, 2)
    made.release()
    assert (made.ram_bytes, made.pending) == (0, 0)
    assert kept.key in made.index.nodes
    assert lost.key not in made.index.nodes


def test_the_disk_keeps_its_cap_over_all_models(tmp_path: Path) -> None:
    """The least recently used files go, another model's before ours, and the index follows."""
    other = tmp_path / "another-model"
    other.mkdir()
    stale = other / f"{'0' * 64}.kv.safetensors"
    stale.write_bytes(b"x" * BLOCK_BYTES)
    made = store(tmp_path, ram_blocks=100, cap=6 * BLOCK_BYTES)
    nodes = []
    for i in range(20):
        nodes.append(block(made, i))
        flush(made)
    made.shrink(0)
    until(made, lambda: sum(f.stat().st_size for f in files(tmp_path)) <= 6 * BLOCK_BYTES)
    assert not stale.exists()
    until(made, lambda: len(made.index) == len(files(tmp_path)))
    assert nodes[-1].key in made.index.nodes


def test_a_strangers_file_is_cleared_away_like_any_other(tmp_path: Path) -> None:
    """A file with the suffix of records that is none, put there while the worker runs."""
    made = store(tmp_path, ram_blocks=100, cap=6 * BLOCK_BYTES)
    block(made, 0)
    flush(made)
    strangers = [tmp_path / "model" / f"{name}.safetensors" for name in ("weights", f"{'0' * 64}.other")]
    for path in strangers:
        path.write_bytes(b"x" * BLOCK_BYTES)
        os.utime(path, (1.0, 1.0))
    for i in range(1, 12):
        block(made, i)
        flush(made)
    until(made, lambda: not any(path.exists() for path in strangers))
    until(made, lambda: made.disk_bytes <= 6 * BLOCK_BYTES)


def test_two_processes_share_a_directory(tmp_path: Path) -> None:
    """What one wrote the other finds by its next look; what one removed is a miss for the other."""
    ours, theirs = store(tmp_path, 10), store(tmp_path, 10)
    node = block(theirs, 7)
    flush(theirs)
    ours._scan_after = 0.0
    until(ours, lambda: node.key in ours.index.nodes)
    found = ours.index.nodes[node.key]
    theirs.forget(node)
    until(theirs, lambda: not files(tmp_path))
    ours.read([found.records[Kind.KV]])
    until(ours, lambda: node.key not in ours.index.nodes)
    assert ours.counters.unreadable == 1


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "noise", "swap"])
def test_a_damaged_file_is_a_miss(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused, told of, removed, and its record forgotten: never a wrong value."""
    made = store(tmp_path, ram_blocks=10)
    nodes = [block(made, i) for i in range(2)]
    flush(made)
    made.release()
    record = nodes[0].records[Kind.KV]
    path = tmp_path / "model" / f"{nodes[0].key.hex()}.kv.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    contents = {"flip": raw, "truncate": raw[:1000], "empty": b"", "noise": b"\x08" * 5000}
    if damage == "swap":
        shutil.copy(tmp_path / "model" / f"{nodes[1].key.hex()}.kv.safetensors", path)
    else:
        path.write_bytes(contents[damage])
    made.read([record])
    until(made, lambda: nodes[0].key not in made.index.nodes)
    assert made.counters.unreadable == 1
    assert "is not used" in caplog.text
    assert not path.exists()
    again = store(tmp_path, ram_blocks=10)
    assert list(again.index.nodes) == [nodes[1].key]


def check_refused(made: RecordStore, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that refuses writes: one warning, everything still served from RAM, flush says so."""
    nodes = [block(made, i) for i in range(4)]
    until(made, lambda: made.counters.failed > 0)
    made.pump(busy=False)
    failed = made.counters.failed
    for _ in range(20):
        made.pump(busy=False)
        made.wait(0.01)
    assert made.counters.failed <= failed + 3  # it is left alone for a while
    flush(made)
    assert made.missing > 0
    assert [value(n) for n in nodes] == [0.0, 1.0, 2.0, 3.0]
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1


def test_a_directory_that_cannot_be_made_costs_no_more_than_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in the directory's place; once it is gone, flush writes what was refused before."""
    (tmp_path / "model").write_bytes(b"")
    made = store(tmp_path, ram_blocks=10)
    check_refused(made, caplog)
    (tmp_path / "model").unlink()
    flush(made)
    assert made.missing == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    at = tmp_path / "small"
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(at)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True)


def test_a_full_disk_costs_no_more_than_a_warning(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What fits is written, the rest stays in RAM, and no half file is left."""
    made = store(small_disk, ram_blocks=10)
    check_refused(made, caplog)
    again = store(small_disk, ram_blocks=10)
    assert 0 < len(again.index) < 4
    assert not list((small_disk / "model").glob("*.partial"))


def test_a_retry_comes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after a refused write the store tries again without a flush."""
    monkeypatch.setattr(store_module, "_RETRY_S", 0.1)
    (tmp_path / "model").write_bytes(b"")
    made = store(tmp_path, ram_blocks=10)
    block(made, 1)
    until(made, lambda: made.counters.failed > 0)
    (tmp_path / "model").unlink()
    until(made, lambda: made.missing == 0)
    assert made.counters.spills == 1


@pytest.mark.parametrize("seed", range(4))
def test_sums_and_states_stay_true_whatever_happens(tmp_path: Path, seed: int) -> None:
    """Random inserts, touches, pins, reads, losses of files, shrinks and flushes: every byte stays counted,
    no record is in two places, and what is in RAM has the value it was given."""
    rng = random.Random(seed)
    made = store(tmp_path, ram_blocks=6, spills=3, cap=20 * BLOCK_BYTES)
    pinned: list[Node] = []
    for step in range(300):
        nodes = list(made.index.nodes.values())
        match rng.randrange(9):
            case 0 | 1 | 2:
                parent = rng.choice(nodes) if nodes and rng.random() < 0.5 else None
                node = made.index.find(parent.key if parent else ROOT, token_bytes([step] * BLOCK_TOKENS))
                assert node is None
                block(made, step, parent.key if parent else ROOT, parent.stop if parent else 0)
            case 3 if nodes:
                made.touch(made.index.chain(rng.choice(nodes)))
            case 4 if nodes:
                made.read([r for r in rng.choice(nodes).records.values() if r.arrays is None])
            case 5 if nodes and len(pinned) < 5:
                pinned.append(rng.choice(nodes))
                made.pin([pinned[-1]], 1)
            case 6 if pinned:
                made.pin([pinned.pop(rng.randrange(len(pinned)))], -1)
            case 7 if nodes:
                made.forget(rng.choice(nodes))
            case 8:
                made.shrink(rng.randrange(2, 7) * BLOCK_BYTES)
        made.pump(busy=rng.random() < 0.5)
        if step % 50 == 49:
            flush(made)
        check_sums(made)
    for path in files(tmp_path)[::2]:
        path.unlink()
    flush(made)
    check_sums(made)


def check_sums(made: RecordStore) -> None:
    records = [r for n in made.index.nodes.values() for r in n.records.values()]
    ram, spilled, dirty = set(made._ram), set(made._spilled), set(made._dirty)
    assert not ram & spilled
    assert dirty <= ram
    assert (made.ram_bytes, made.spill_bytes) == (
        sum(r.nbytes for r in ram),
        sum(r.nbytes for r in spilled),
    )
    assert made.ram_bytes <= made.ram_cap
    assert made.disk_bytes == sum(r.nbytes for r in records if r.on_disk)
    assert made._pinned_bytes == sum(r.nbytes for r in ram if r.node.pins)
    assert {r for r in records if r.arrays is not None} == ram | spilled
    assert made.index.tokens == sum(r.node.length for r in records)
    for record in ram | spilled:
        number = int.from_bytes(record.node.tokens[:4], "little")
        assert value(record.node) == number
