"""The bytes on the wire are what they were: fixtures for every message of every protocol minor."""

import json
import runpy
from pathlib import Path

import pytest

from mlxhost.wire import control, data
from mlxhost.wire.codec import decode, tag_of
from mlxhost.wire.version import PROTOCOL_MAJOR, PROTOCOL_MINOR

samples = runpy.run_path(str(Path(__file__).parent / "samples.py"))
FILES = sorted(samples["GOLDEN"].glob("*.json"))
CASES = [(file.stem, name) for file in FILES for name in json.loads(file.read_text())]


def frames(version: str, name: str) -> list[bytes]:
    fixtures = json.loads((samples["GOLDEN"] / f"{version}.json").read_text())
    return [bytes.fromhex(frame) for frame in fixtures[name]]


@pytest.mark.parametrize(("version", "name"), CASES)
def test_fixture_decodes_to_its_sample(version: str, name: str) -> None:
    """Every fixture, old ones included, decodes to the message it was made from."""
    message, binary = samples["SAMPLES"][name]
    decoded, extra = decode(frames(version, name))
    assert decoded == message
    assert tuple(extra) == binary


@pytest.mark.parametrize("name", list(samples["SAMPLES"]))
def test_encoding_has_not_changed(name: str) -> None:
    """Today's encoder writes today's fixture byte for byte."""
    version = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    assert [bytes.fromhex(f) for f in samples["fixture"](name)] == frames(version, name)


def test_every_message_has_a_sample() -> None:
    """No message of the protocol is without a golden fixture."""
    tags = {tag_of(type(message)) for message, _ in samples["SAMPLES"].values()}
    assert tags == {tag_of(m) for m in (*data.MESSAGES, *control.MESSAGES)}
