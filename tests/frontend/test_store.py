"""Card files that are not on this machine: fetched piece by piece, checked, kept by content."""

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.frontend_models import write_model

from mlxhost.frontend.errors import CardError
from mlxhost.frontend.text.card import CardFiles
from mlxhost.frontend.text.model import load_text_model
from mlxhost.frontend.text.store import MAX_FILE_BYTES, CardStore
from mlxhost.wire.control import CardFile, ModelCard, Reply
from mlxhost.worker.card import model_card

PIECE = 1000


class Elsewhere:
    """A machine that has the files of a model."""

    def __init__(self, directory: Path) -> None:
        files = {f: f.read_bytes() for f in directory.iterdir()}
        self.content = {hashlib.sha256(data).hexdigest(): data for data in files.values()}
        self.calls = 0
        self.damage = False

    async def call(self, op: str, args: dict[str, Any], deadline_s: float) -> Reply:
        assert op == "card_file"
        self.calls += 1
        data = self.content.get(args["sha256"])
        if data is None:
            return Reply("c", "not_found", "no machine has it")
        piece = data[args["offset"] : args["offset"] + PIECE]
        return Reply("c", result={"data": b"x" * len(piece) if self.damage else piece})


@pytest.fixture
def far(tmp_path: Path) -> tuple[Elsewhere, ModelCard]:
    """A model that is on the other machine only, and its card."""
    directory = write_model(tmp_path / "far")
    machine, card = Elsewhere(directory), model_card(directory)
    return machine, msgspec.structs.replace(card, directory="/nowhere/model")


def ensure(store: Path, machine: Elsewhere, card: ModelCard) -> None:
    with ThreadPoolExecutor(1) as executor:
        asyncio.run(CardStore(store, executor, machine.call).ensure(card))


def test_all_files_come_over_and_make_a_text_model(tmp_path: Path, far: tuple[Elsewhere, ModelCard]) -> None:
    """After one round the tokenizer and template work without the model's directory."""
    machine, card = far
    ensure(tmp_path / "cards", machine, card)
    text = load_text_model(card, tmp_path / "cards")
    assert text.tokenizer.decode(text.tokenizer.encode("hello").ids) == "hello"
    assert {p.name for p in (tmp_path / "cards").iterdir()} == {f.sha256 for f in card.files}


def test_nothing_is_fetched_twice_or_without_need(tmp_path: Path, far: tuple[Elsewhere, ModelCard]) -> None:
    """Kept files, and those of a directory that is here, need no call."""
    machine, card = far
    ensure(tmp_path / "cards", machine, card)
    calls = machine.calls
    ensure(tmp_path / "cards", machine, card)
    ensure(tmp_path / "other", machine, msgspec.structs.replace(card, directory=str(tmp_path / "far")))
    assert machine.calls == calls


def test_a_kept_file_that_was_damaged_is_fetched_again(
    tmp_path: Path, far: tuple[Elsewhere, ModelCard]
) -> None:
    """The content decides, not the name."""
    machine, card = far
    ensure(tmp_path / "cards", machine, card)
    (tmp_path / "cards" / card.files[0].sha256).write_bytes(b"torn")
    ensure(tmp_path / "cards", machine, card)
    assert CardFiles(card, tmp_path / "cards").read(card.files[0].name)


def test_other_content_is_not_kept(tmp_path: Path, far: tuple[Elsewhere, ModelCard]) -> None:
    """A machine that sends something else is an error that names the file, and leaves nothing behind."""
    machine, card = far
    machine.damage = True
    with pytest.raises(CardError, match="other content than its model card says"):
        ensure(tmp_path / "cards", machine, card)
    assert not (tmp_path / "cards").exists()


def test_a_directory_that_names_a_device_is_not_read(
    tmp_path: Path, far: tuple[Elsewhere, ModelCard]
) -> None:
    """A path in another machine's card may be anything here: /dev/zero is not a model's file."""
    machine, card = far
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "tokenizer.json").symlink_to("/dev/zero")
    odd = msgspec.structs.replace(card, directory=str(tmp_path / "odd"))
    ensure(tmp_path / "cards", machine, odd)
    assert CardFiles(odd, tmp_path / "cards").read("tokenizer.json")
    with pytest.raises(CardError, match="not a file that belongs to a model"):
        CardFiles(odd).read("tokenizer.json")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (CardFile("tokenizer.json", "0" * 64, 10), "no machine has it"),
        (CardFile("tokenizer.json", "0" * 64, MAX_FILE_BYTES + 1), "at most"),
        (CardFile("tokenizer.json", "../../etc/passwd", 10), "not a SHA-256"),
    ],
)
def test_cards_that_cannot_be_served_say_why(
    tmp_path: Path, far: tuple[Elsewhere, ModelCard], file: CardFile, message: str
) -> None:
    """Unknown content, too large a file, and a hash that is a path."""
    machine, card = far
    with pytest.raises(CardError, match=message):
        ensure(tmp_path / "cards", machine, msgspec.structs.replace(card, files=[file]))
