"""Makes an estimator from what a user chose: a name, a place, a class, an object."""

from collections.abc import Callable, Mapping

from jinfercept.sched.estimator import ESTIMATORS, Estimator
from jinfercept.sched.guards import guarded_plugin
from jinfercept.sched.plugins import check_name, is_place

type EstimatorChoice = str | Estimator | type[Estimator] | Callable[[], Estimator]
"""A name; a place, `path.py:Class` or `package.module:Class`; a class or a function, called once for every
engine; or an estimator, for one engine."""


def make_estimator(choice: EstimatorChoice, names: Mapping[str, Callable[[], Estimator]] = ESTIMATORS) -> Estimator:
    """Make an estimator; one that is not built in is guarded.

    Args:
        choice: see `EstimatorChoice`.
        names: the built-in ones.

    Raises:
        ConfigError: no estimator has the name, or as `build_plugin`.
    """
    if isinstance(choice, str) and not is_place(choice):
        check_name("estimator", choice, names)
        return names[choice]()
    return guarded_plugin("estimator", choice, Estimator, ESTIMATORS.values())
