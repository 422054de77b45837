"""The protocol between mlxhost's processes: message structs, codec, sockets, handshake, version.

Knows nothing of HTTP, models or policy. Imports none of the other packages.
"""
