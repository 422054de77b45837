"""The configuration of a fleet: one table of options, read from flags, environment and mlxhost.toml."""
