"""The names of the routing policies: what FleetModel.routing may be. docs/routing.md says what each does."""

ROUTINGS = ("round-robin", "least-in-flight", "minimum-kv-usage", "prefix-affinity", "bootstrap-room")
