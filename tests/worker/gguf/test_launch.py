"""Converting in a process of its own: once, whole, and never longer than its parent lives."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType as Q
from support.tiny_gguf import TinyLlama

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.cache import cached_directory, lock_path, partial_path
from mlxhost.worker.gguf.launch import ensure_converted

COMMAND = [sys.executable, "-I", "-m", "mlxhost.worker.gguf", "convert"]


def ignore(done: int, total: int) -> None:
    """Progress nobody looks at."""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "my tiny.gguf"
    TinyLlama(Q.Q8_0).write(path)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 60 MB of Q4_0: converting takes a second or two."""
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    TinyLlama(Q.Q4_0, hidden=1536, layers=5).write(path)
    return path


def test_converts_once_and_then_returns_at_once(tiny: Path, tmp_path: Path) -> None:
    """The first call reports progress to the end, the second starts nothing, and a changed file is new."""
    seen: list[tuple[int, ...]] = []
    cache = tmp_path / "cache"
    directory = ensure_converted(tiny, "float32", cache, lambda *progress: seen.append(progress))
    assert directory == cached_directory(tiny, "float32", cache)
    assert directory.name.startswith("my-tiny-float32-")
    assert seen[-1][0] == seen[-1][1] > 0
    assert {path.name for path in directory.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    seen.clear()
    assert ensure_converted(tiny, "float32", cache, lambda *progress: seen.append(progress)) == directory
    assert not seen
    os.utime(tiny, ns=(1, 1))
    assert cached_directory(tiny, "float32", cache) != directory


def test_kept_and_expanded_lie_side_by_side(tiny: Path, tmp_path: Path) -> None:
    """The same file in both forms is two directories, each found again; the kept one is about a third of
    the size and says how its layers are laid out."""
    kept = ensure_converted(tiny, "float32", tmp_path, ignore, keep_quantised=True)
    expanded = ensure_converted(tiny, "float32", tmp_path, ignore)
    assert kept.name.startswith("my-tiny-float32-quantised-")
    assert (kept, expanded) == (
        cached_directory(tiny, "float32", tmp_path, keep_quantised=True),
        cached_directory(tiny, "float32", tmp_path),
    )
    sizes = [(directory / "model.safetensors").stat().st_size for directory in (kept, expanded)]
    assert 0.25 < sizes[0] / sizes[1] < 0.45
    settings = [json.loads((d / "config.json").read_text()).get("quantization") for d in (kept, expanded)]
    assert settings == [{"group_size": 32, "bits": 8, "mode": "affine"}, None]


def test_what_is_not_supported_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown architecture and an unknown kind of block are named, with what is known, before the
    tokenizer is built or a byte is written."""
    from mlxhost.worker.gguf import convert

    monkeypatch.setattr(convert, "tokenizer_files", lambda *_: pytest.fail("the tokenizer was built"))
    source = tmp_path / "odd.gguf"
    TinyLlama(metadata={"general.architecture": "mamba"}).write(source)
    with pytest.raises(ModelError, match=r"'mamba' is not supported as GGUF \(supported: gemma3, llama"):
        convert.convert(source, tmp_path / "out", "float32", lambda done, total: None)
    TinyLlama(tensors={"blk.1.ffn_up.weight": np.zeros((96, 64), np.float64)}).write(source)
    with pytest.raises(ModelError, match=r"ffn_up\.weight has the quantisation F64.*supported: BF16, F16"):
        convert.convert(source, tmp_path / "out", "float32", lambda done, total: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd.gguf", "out.lock"]


def test_the_way_in_imports_nothing_heavy() -> None:
    """A worker that imports the launcher has neither numpy nor mlx nor gguf in memory for it."""
    code = (
        "import sys; import mlxhost.worker.gguf.launch; "
        "sys.exit(bool({'numpy', 'mlx', 'gguf', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-I", "-c", code], timeout=30, check=False).returncode == 0


def test_errors_keep_their_code_and_leave_nothing(tiny: Path, tmp_path: Path) -> None:
    """A truncated file is bad_model, an absent one too, and nothing but the lock is left in the cache."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"cut\.gguf: truncated: tensor .* fetch it again") as caught:
        ensure_converted(cut, "float32", tmp_path / "cache", ignore)
    assert caught.value.code == "bad_model"
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    with pytest.raises(ModelError, match="No such file"):
        ensure_converted(tmp_path / "absent.gguf", "float32", tmp_path / "cache", ignore)


def test_two_at_once_convert_once(large: Path, tmp_path: Path) -> None:
    """The second caller waits, sees the first one's progress and gets the same directory."""
    results: dict[int, Path] = {}
    progress: dict[int, list[int]] = {0: [], 1: []}

    def convert(number: int) -> None:
        results[number] = ensure_converted(
            large, "bfloat16", tmp_path, lambda done, total: progress[number].append(done)
        )

    threads = [threading.Thread(target=convert, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results[0] == results[1]
    assert min(max(seen) for seen in progress.values()) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        results[0].name,
        lock_path(results[0]).name,
    ]


def test_a_killed_conversion_is_never_used(large: Path, tmp_path: Path) -> None:
    """SIGKILL midway leaves no directory; the next try clears the remains and succeeds."""
    directory = cached_directory(large, "float32", tmp_path)
    process = subprocess.Popen(
        [*COMMAND, str(large), str(directory), "--dtype", "float32"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process:
        while json.loads(process.stdout.readline())["done"] == 0:
            pass
        process.kill()
    assert partial_path(directory).is_dir()
    assert not directory.exists()
    assert ensure_converted(large, "float32", tmp_path, ignore) == directory
    assert not partial_path(directory).exists()


def test_a_callback_that_raises_ends_the_conversion(large: Path, tmp_path: Path) -> None:
    """A worker told to stop gets out at once, and the converter is gone."""

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_converted(large, "float32", tmp_path, stop)
    assert not [child for child in psutil.Process().children() if "mlxhost.worker.gguf" in child.cmdline()]


@pytest.mark.parametrize("how", ["lifeline", "parent killed"])
def test_the_converter_goes_when_its_parent_does(large: Path, tmp_path: Path, how: str) -> None:
    """Closing the pipe, or killing the parent, ends the conversion within two seconds."""
    directory = tmp_path / "out"
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(p.pid, p.stdout.readline(), flush=True)\n"
        "p.stdin.close() if sys.stdin.readline() else None\n"
        "time.sleep(60)\n"
    )
    # Held, so that the converter waits instead of finishing first.
    with lock_path(directory).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        parent = subprocess.Popen(
            [sys.executable, "-c", code, *COMMAND, str(large), str(directory), "--dtype", "float32"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert parent.stdin is not None
        assert parent.stdout is not None
        with parent:
            converter = psutil.Process(int(parent.stdout.readline().split()[0]))
            if how == "lifeline":
                parent.stdin.write(b"close\n")
                parent.stdin.flush()
            else:
                parent.send_signal(signal.SIGKILL)
            deadline = time.monotonic() + 2
            while converter.is_running() and converter.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            parent.kill()


def test_a_holder_without_progress_is_given_up(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that is held for ever ends in an error that names it."""
    from mlxhost.worker.gguf import convert

    monkeypatch.setattr(convert, "STUCK_S", 0.5)
    with lock_path(tmp_path / "out").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match=r"has held .*out\.lock for"):
            convert.convert(tiny, tmp_path / "out", "float32", lambda done, total: None)


def test_a_disk_without_room_is_told_before_it_is_filled(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message gives what is needed and what is free."""
    from mlxhost.worker.gguf import convert

    usage = convert.shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"needs 0\.00 GB, 0\.00 GB are free; make room") as caught:
        convert.convert(tiny, tmp_path / "out", "float32", lambda done, total: None)
    assert caught.value.code == "cannot_write"


def test_a_cache_that_cannot_be_written_says_so(tiny: Path, tmp_path: Path) -> None:
    """A file where the cache directory should be is a cannot_write error that names it."""
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ModelError, match="cache: ") as caught:
        ensure_converted(tiny, "float32", tmp_path / "cache", ignore)
    assert caught.value.code == "cannot_write"


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Converting 340 MB of float32 output takes less than 160 MB at its peak: chunks, not tensors."""
    source = tmp_path / "big.gguf"
    TinyLlama(Q.Q8_0, hidden=2048, layers=3).write(source)
    # Sampled: the kernel's own peak of a child counts what it shared with us before exec.
    peak = 0
    process = psutil.Popen(
        [*COMMAND, str(source), str(tmp_path / "out"), "--dtype", "float32"], stdout=subprocess.DEVNULL
    )
    while process.poll() is None:
        with suppress(psutil.Error):
            peak = max(peak, process.memory_info().rss)
        time.sleep(0.01)
    assert process.returncode == 0
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 300e6
    assert 40e6 < peak < 160e6
