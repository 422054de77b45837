"""What the HTTP handlers work with: one instance a process."""

from dataclasses import dataclass

from mlxhost.frontend.control import ControlLink
from mlxhost.frontend.dispatch import Dispatcher
from mlxhost.frontend.gate import Gate, RequestIds
from mlxhost.frontend.http.access import Access
from mlxhost.frontend.http.sse import KeepAlive
from mlxhost.frontend.models import ModelTable
from mlxhost.frontend.text.model import TextModels
from mlxhost.frontend.text.prompts import Prompts
from mlxhost.frontend.waiting import Waiting


@dataclass(frozen=True)
class Services:
    table: ModelTable
    dispatcher: Dispatcher
    texts: TextModels
    prompts: Prompts
    gate: Gate
    request_ids: RequestIds
    keep_alive: KeepAlive
    waiting: Waiting
    control: ControlLink
    access: Access
    max_body_bytes: int
