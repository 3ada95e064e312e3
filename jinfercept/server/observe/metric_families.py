"""Metric families of `prometheus_client` for one model: each has the label `model_name`, some have more labels."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from jinfercept.meter.counts import Histogram


class MetricFamilies(NamedTuple):
    """Makes metric families of one value, or of several by the values of further labels: a tuple for several labels.

    Attributes:
        model: value of the label `model_name`.
    """

    model: str

    def gauge(self, name: str, text: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
        """A value that rises and falls."""
        return self._filled(GaugeMetricFamily(name, text, labels=["model_name", *labels]), values)

    def counter(self, name: str, text: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
        """A value that only rises; its name gets the suffix `_total`."""
        return self._filled(CounterMetricFamily(name, text, labels=["model_name", *labels]), values)

    def histogram(self, name: str, text: str, values: Histogram | Mapping[Any, Histogram], *labels: str) -> Metric:
        """A histogram with the buckets of the engine's own."""
        family = HistogramMetricFamily(name, text, labels=["model_name", *labels])
        for key, histogram in self._keyed(values):
            buckets = [(floatToGoString(bound), count) for bound, count in histogram.cumulative]
            family.add_metric(key, buckets, histogram.total)
        return family

    def info(self, name: str, text: str, values: Mapping[str, object]) -> Metric:
        """Constants as labels; the name gets the suffix `_info`."""
        family = InfoMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model], {key: str(value) for key, value in values.items()})
        return family

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: float | Mapping[Any, float]) -> Metric:
        for key, value in self._keyed(values):
            family.add_metric(key, value)
        return family

    def _keyed(self, values: Any) -> Iterator[tuple[list[str], Any]]:
        """Values with the values of all labels."""
        for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
            yield [self.model, *(map(str, key) if isinstance(key, tuple) else (str(key),))], value
