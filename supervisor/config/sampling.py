"""Sampling defaults of a model: what holds for requests that do not say, before generation_config.json."""

from dataclasses import dataclass

from mlxhost.supervisor.config.kinds import Number, Whole
from mlxhost.supervisor.config.table import option

SAMPLING = "sampling"  # the table's key in a model's table


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """None: what the model's generation_config.json says, else the API's default."""

    temperature: float | None = option(
        None, Number(0, 2), "0 takes the likeliest token", unset="the model's", live=True
    )
    top_p: float | None = option(
        None, Number(0, 1), "share of the probability that is drawn from", unset="the model's", live=True
    )
    top_k: int | None = option(
        None, Whole(0), "number of tokens that are drawn from (0: all)", unset="the model's", live=True
    )
    min_p: float | None = option(
        None, Number(0, 1), "least probability, relative to the likeliest", unset="the model's", live=True
    )
