"""API keys over HTTP: what is open, what needs a key, and what an admin key opens."""

import hashlib
import http.client
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.frontend_harness import Host, host, wait_for

from mlxhost.frontend.http.access import Access
from mlxhost.wire.control import ApiKey, Keys

ALICE, ROOT, WRONG = "alice-" * 4, "root-key-" * 3, "wrong-key-" * 3


def key(name: str, value: str, *, admin: bool = False) -> ApiKey:
    return ApiKey(name, hashlib.sha256(value.encode()).hexdigest(), admin)


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Host]:
    with host() as made:
        made.start_frontend(keys=[key("alice", ALICE), key("root", ROOT, admin=True)])
        yield made


def get(made: Host, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, object], str]:
    """Status, error object (or body) and WWW-Authenticate."""
    connection = http.client.HTTPConnection(made.url.removeprefix("http://"), timeout=20)
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body.get("error", body), response.headers.get("WWW-Authenticate", "")


def test_every_route_but_health_and_ready_needs_a_key(keyed: Host) -> None:
    """401 in the API's error shape without one or with a wrong one, unknown routes included."""
    for path in ("/v1/models", "/", "/no/such/route", "/admin/status"):
        for headers, word in (
            ({}, "needs an API key"),
            ({"Authorization": f"Bearer {WRONG}"}, "is not valid"),
        ):
            status, error, challenge = get(keyed, path, **headers)
            assert (status, error["code"], challenge) == (401, "invalid_api_key", "Bearer")
            assert word in str(error["message"])
    assert get(keyed, "/health")[0] == 200
    assert get(keyed, "/ready")[0] == 503  # no model yet


@pytest.mark.parametrize("header", ["Authorization: Bearer {}", "Authorization: bearer  {}", "x-api-key: {}"])
def test_a_key_is_taken_in_both_dialects(keyed: Host, header: str) -> None:
    """OpenAI's header and Anthropic's."""
    name, _, value = header.format(ALICE).partition(": ")
    assert get(keyed, "/v1/models", **{name: value})[0] == 200


def test_admin_needs_an_admin_key_on_tcp(keyed: Host) -> None:
    """Another key is 403 and named; the admin key reaches the operation."""
    status, error, _ = get(keyed, "/admin/status", x_api_key=ALICE)
    assert (status, "'alice' does not open /admin" in str(error["message"])) == (403, True)
    assert get(keyed, "/admin/load", x_api_key=ROOT)[0] == 405  # reached, and GET is not for it


def test_without_keys_everything_is_open_but_admin(tmp_path: Path) -> None:
    """On TCP /admin is refused with the way out."""
    with host() as made:
        made.start_frontend()
        assert get(made, "/v1/models")[0] == 200
        status, error, _ = get(made, "/admin/status")
        assert (status, "unix socket" in str(error["message"])) == (403, True)


def test_keys_change_while_it_runs(keyed: Host) -> None:
    """A key that is gone is refused from then on, a new one taken."""
    child = next(iter(keyed.children.values()))
    keyed.send(child, Keys([key("bob", WRONG)]))
    wait_for(lambda: get(keyed, "/v1/models", x_api_key=WRONG)[0] == 200)
    assert get(keyed, "/v1/models", x_api_key=ALICE)[0] == 401


def test_every_key_is_compared_whichever_matches() -> None:
    """The time to find the first of 2,000 keys is that of finding the last, within a factor of 1.5."""
    access = Access([key(str(i), f"key-{i}" * 5) for i in range(2_000)])

    def seconds(value: str) -> float:
        begin = time.perf_counter()
        assert access.holder(value)
        return time.perf_counter() - begin

    pairs = [(seconds("key-0" * 5), seconds("key-1999" * 5)) for _ in range(30)]
    first, last = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert 1 / 1.5 < first / last < 1.5
