"""`mlxhost up` as a service of the system: systemd's user manager on Linux, launchd on macOS."""
