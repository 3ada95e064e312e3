"""Metrics of one model as Prometheus takes them: every one has the label `model_name`, some have more."""

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from jinfercept.meter.histogram import Histogram

Values = Mapping[tuple[str, ...], float]
"""By the values of the labels."""


class Named(NamedTuple):
    """Makes them.

    Attributes:
        model: its name.
    """

    model: str

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """What goes up and down."""
        return self.gauges(name, text, {(): value})

    def gauges(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        """The same, by labels."""
        family = GaugeMetricFamily(name, text, labels=["model_name", *labels])
        for key, value in values.items():
            family.add_metric([self.model, *key], value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """What only goes up; `_total` is added to its name."""
        return self.counters(name, text, {(): value})

    def counters(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        """The same, by labels."""
        family = CounterMetricFamily(name, text, labels=["model_name", *labels])
        for key, value in values.items():
            family.add_metric([self.model, *key], value)
        return family

    def histogram(self, name: str, text: str, values: Histogram) -> Metric:
        """Values by size."""
        return self.histograms(name, text, {(): values})

    def histograms(self, name: str, text: str, values: Mapping[tuple[str, ...], Histogram], *labels: str) -> Metric:
        """The same, by labels."""
        family = HistogramMetricFamily(name, text, labels=["model_name", *labels])
        for key, one in values.items():
            buckets = [(floatToGoString(bound), count) for bound, count in one.cumulative]
            family.add_metric([self.model, *key], buckets, one.total)
        return family

    def info(self, name: str, text: str, values: Mapping[str, object]) -> Metric:
        """What does not change, as labels; `_info` is added to its name."""
        family = InfoMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model], {key: str(value) for key, value in values.items()})
        return family
