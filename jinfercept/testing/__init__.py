"""Checks code of the user's own on engines without a model: knows the engine and the simulator, and no JAX."""

from jinfercept.testing.order_check import OrderCheckError as OrderCheckError
from jinfercept.testing.order_check import check_order as check_order
from jinfercept.testing.policy_check import PolicyCheckError as PolicyCheckError
from jinfercept.testing.policy_check import check_policy as check_policy
