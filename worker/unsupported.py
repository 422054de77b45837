"""Operations of other engines that this one does not have, each with the reason. Answered `unsupported`."""

_ONE_DEVICE = (
    "each replica computes on one device in one process, so there is no group to transfer weights in"
)
_ADAPTERS = "adapters are not served yet; merge the adapter into the weights and use reload_weights"

REASONS = {
    "update_weights_from_distributed": f"{_ONE_DEVICE}; reload_weights reads a changed model directory",
    "update_weights_from_tensor": (
        "no weights travel over the wire; write a model directory and use reload_weights"
    ),
    "init_weights_update_group": _ONE_DEVICE,
    "destroy_weights_update_group": _ONE_DEVICE,
    "rebalance_experts": "all experts of a model are on the one device; there is nothing to balance",
    "add_adapter": _ADAPTERS,
    "remove_adapter": _ADAPTERS,
    "list_adapters": _ADAPTERS,
    "pin_adapter": _ADAPTERS,
}


def reason(op: str, known: list[str]) -> str:
    """Why `op` is not done here."""
    if op in REASONS:
        return f"{op}: {REASONS[op]}"
    return f"this worker has no operation {op!r}; it has: {', '.join(known)}"
