"""GET /v1/models and /v1/models/{id}: what is served, and in which state."""

from aiohttp import web

from mlxhost.frontend.http.context import services_of
from mlxhost.frontend.models import max_model_len, state_of
from mlxhost.wire.control import FleetModel


async def list_models(http: web.Request) -> web.Response:
    """Every model of the fleet, ready or not."""
    models = services_of(http).table.fleet.models
    return web.json_response({"object": "list", "data": [model_object(m) for m in models]})


async def get_model(http: web.Request) -> web.Response:
    """One model by any of its names. Raises ModelNotFound."""
    return web.json_response(model_object(services_of(http).table.resolve(http.match_info["id"])))


def model_object(model: FleetModel) -> dict[str, object]:
    """The API's fields first, then ours."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "mlxhost",
        "max_model_len": max_model_len(model) or None,
        "state": state_of(model),
        "aliases": model.aliases,
    }
