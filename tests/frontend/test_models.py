"""The model table: names, states and what clients are told of them."""

import pytest

from mlxhost.frontend.errors import ModelNotFound, ModelNotReady, ShuttingDown, Unavailable
from mlxhost.frontend.models import ModelTable, max_model_len, state_of
from mlxhost.wire.control import Fleet, FleetModel, FleetReplica, ModelCard


def card(directory: str) -> ModelCard:
    return ModelCard(directory, [], "llama", 10, [0])


def model(
    name: str, *states: str, aliases: tuple[str, ...] = (), directory: str = "/x/d", reason: str = ""
) -> FleetModel:
    replicas = [FleetReplica(f"{name}/{i}", i, 1, s, max_model_len=100 + i) for i, s in enumerate(states)]
    return FleetModel(name, list(aliases), replicas, "round-robin", card(directory), reason)


def table(*models: FleetModel, accepting: bool = True) -> ModelTable:
    made = ModelTable()
    made.update(Fleet(1, [], list(models), accepting))
    return made


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("org/one", "org/one"),
        ("small", "org/one"),
        ("one-4bit", "org/one"),
        ("two", "two"),
        ("shared", "org/one"),
    ],
)
def test_every_name_of_a_model_leads_to_it(name: str, found: str) -> None:
    """Full id, alias and directory name resolve; the first model keeps an alias that two claim."""
    models = table(
        model("org/one", "ready", aliases=("small", "shared", "two"), directory="/models/one-4bit"),
        model("two", "ready", aliases=("shared",), directory="/models/one-4bit"),
    )
    assert models.resolve(name).name == found


def test_unknown_names_list_what_is_there() -> None:
    """404 tells which models are served."""
    with pytest.raises(ModelNotFound, match=r"'gpt-5'.*a, b\.") as caught:
        table(model("a", "ready"), model("b", "failed")).current("gpt-5")
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("states", "state", "retryable"),
    [
        (("loading",), "loading", True),
        (("starting",), "starting", True),
        (("failed", "loading"), "loading", True),
        (("backoff",), "backoff", True),
        (("draining",), "draining", True),
        (("drained", "draining"), "draining", True),
        (("drained",), "drained", True),
        (("unloaded",), "unloaded", False),
        (("failed",), "failed", False),
        ((), "unloaded", False),
    ],
)
def test_models_that_cannot_serve_say_why(states: tuple[str, ...], state: str, retryable: bool) -> None:
    """503 with the state, the reason, when to retry, and whether retrying can help."""
    with pytest.raises(ModelNotReady, match=f"'a' is {state}: because") as caught:
        table(model("a", *states, reason="because")).current("a")
    error = caught.value
    assert (error.status, error.code, error.retryable) == (503, f"model_{state}", retryable)
    assert error.retry_after_s is not None


def test_before_the_first_fleet_nothing_is_known() -> None:
    """A frontend that has just started says "retry", not that a model does not exist."""
    with pytest.raises(Unavailable, match="starting") as caught:
        ModelTable().current("a")
    assert caught.value.retryable


def test_one_ready_replica_is_enough() -> None:
    """A model with a ready replica serves, whatever the others do, with the ready ones' context."""
    one = model("a", "failed", "ready", "draining")
    assert table(one).current("a") is one
    assert (state_of(one), max_model_len(one)) == ("ready", 101)


def test_nothing_is_taken_once_shutdown_began() -> None:
    """accepting false refuses even ready models."""
    with pytest.raises(ShuttingDown):
        table(model("a", "ready"), accepting=False).current("a")


@pytest.mark.parametrize(
    ("state", "live"),
    [
        ("ready", True),
        ("draining", True),
        ("loading", True),
        ("backoff", False),
        ("failed", False),
        ("unloaded", False),
    ],
)
def test_live_states_keep_their_streams(state: str, live: bool) -> None:
    """Rows of a draining replica go on; those of a dead one do not."""
    assert bool(list(table(model("a", state)).live_replicas())) == live
