"""A frontend with two healthy fake workers, shared by the tests of a module that leave it unharmed."""

from collections.abc import Iterator

import pytest
from support.frontend_harness import host
from support.frontend_models import write_model
from support.frontend_served import ANSWER_IDS, Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = tmp_path_factory.mktemp("served")
    directory = write_model(models / "demo-dir")
    with host() as playing:
        playing.start_frontend()
        playing.start_worker("demo", directory, aliases=("org/demo-135m",), answer=ANSWER_IDS)
        playing.start_worker("echo", write_model(models / "echo-dir"))
        playing.ready("demo", "echo")
        yield Served(playing, directory)
