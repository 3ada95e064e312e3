"""Autoscaling by the memory that requests demand over time, not by their number. Ray Serve calls it; imports no Ray."""

import math
from typing import Any

TARGET = 0.8
"""Share of the device's KV pool that is demanded on average when the number of replicas is right."""


def replicas_by_memory(context: Any) -> tuple[int, dict[str, Any]]:
    """The number of replicas that a deployment needs: demanded memory · time over that of one replica's pool, at `TARGET`.

    Args:
        context: `ray.serve.config.AutoscalingContext`; Ray averages `memory_demand` of each replica over the look-back period.

    Returns:
        The number, which Ray keeps within the deployment's bounds, and no state.
    """
    demands = (context.aggregated_metrics or {}).get("memory_demand", {})
    if len(demands) < context.current_num_replicas or not demands:
        return context.target_num_replicas, {}
    return max(1, math.ceil(sum(demands.values()) / TARGET - 1e-9)), {}
