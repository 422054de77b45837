"""Liveness, readiness, and a pointer for whoever opens the root."""

from aiohttp import web

from mlxhost.frontend.http.context import services_of
from mlxhost.frontend.models import ABSENT, READY, state_of


async def index(http: web.Request) -> web.Response:
    """Where to go from here."""
    return web.json_response({"server": "mlxhost", "api": "/v1", "models": "/v1/models", "ready": "/ready"})


async def health(http: web.Request) -> web.Response:
    """200 as long as this process answers at all."""
    return web.json_response({"status": "alive"})


async def ready(http: web.Request) -> web.Response:
    """200 when at least one model can take a request right now, or is loaded by one, else 503; says so for
    each model."""
    services = services_of(http)
    fleet = services.table.fleet
    models: dict[str, dict[str, object]] = {}
    for model in fleet.models:
        state, routable = state_of(model), services.dispatcher.router.usable(model.name)
        models[model.name] = {
            "state": "connecting" if state == READY and not routable else state,
            "ready": bool(routable) or (state == ABSENT and model.on_demand),
            "replicas_ready": routable,
            "replicas": len(model.replicas),
            "reason": model.reason,
        }
    serving = fleet.accepting and any(m["ready"] for m in models.values())
    body = {"ready": serving, "accepting": fleet.accepting, "models": models}
    return web.json_response(body, status=200 if serving else 503)
