"""KV caches of running rows: one RowKV a request, packed for the step, seen by the model as views.

In one forward the projections and the MLP run once over all rows; attention runs once a pack; state layers
(SSM, convolution) run densely, having no length.
"""

from mlxhost.worker.kv.plan import PackRule
from mlxhost.worker.kv.rowkv import RowKV
from mlxhost.worker.kv.step import Batching, StepCaches, StepShape

__all__ = ["Batching", "PackRule", "RowKV", "StepCaches", "StepShape"]
