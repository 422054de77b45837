"""`mlxhost config check`: a file whole, with the models and keys that it names."""

import os
from pathlib import Path

from mlxhost.supervisor.config import effective, file
from mlxhost.supervisor.config.asked import Asked
from mlxhost.supervisor.config.tables import PATH
from mlxhost.supervisor.errors import UserError


def check(path: Path) -> list[file.Problem]:
    """Every mistake in the file; none: `mlxhost up` would take it."""
    try:
        document = file.load(path)
    except file.Problems as wrong:
        return wrong.problems
    problems = [*_keys(document), *_models(document)]
    if not problems:
        try:
            effective.read(Asked(environment=os.environ, path=path))
        except UserError as error:
            problems.append(file.Problem(str(path), 0, 0, "", str(error)))
    return problems


def _keys(document: file.Document) -> list[file.Problem]:
    problems = []
    for name in document.keys:
        try:
            effective.key(document, name, os.environ)
        except UserError as error:
            place = next(iter(document.keys[name].values())).place
            problems.append(file.Problem(str(document.path), *place, f"keys.{name}", f"keys.{name}: {error}"))
    return problems


def _models(document: file.Document) -> list[file.Problem]:
    from mlxhost.supervisor import resolve

    problems = []
    for name, table in document.models.items():
        try:
            resolve.locate([effective.spec_of_table(document, name)])
        except UserError as error:
            place = table[PATH.name].place if PATH.name in table else document.tables[name]
            problems.append(
                file.Problem(str(document.path), *place, f"models.{name}", f"models.{name}: {error}")
            )
    return problems
