"""Protocol version and schema hash, compared in the handshake.

A different major version or schema hash is refused. The hash covers the name, fields and types of every
struct that travels, so two builds that would misread each other never get to try.
"""

import hashlib

from msgspec import Struct

from mlxhost.wire import control, data

BUILD = "0.1.0"  # the version of mlxhost; pyproject.toml reads it from here
PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0


def schema() -> str:
    """One line for each struct of the protocol: its module, name and fields with their types.

    Written from annotations: msgspec's own JSON schema would cost every worker 7 MB of memory.
    """
    structs = [
        value
        for module in (data, control)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Struct) and value.__module__ == module.__name__
    ]
    lines = []
    for s in structs:
        fields = ", ".join(f"{field}: {s.__annotations__[field]}" for field in s.__struct_fields__)
        lines.append(f"{s.__module__}.{s.__name__}({fields})")
    return "\n".join(sorted(lines))


SCHEMA = hashlib.sha256(schema().encode()).hexdigest()[:16]
