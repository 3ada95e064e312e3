"""Metric families of `prometheus_client` for one model: each has the label `model_name`, some have more labels."""

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

LabelledValues = Mapping[tuple[str, ...], float]
"""Values by the values of the labels that follow `model_name`."""


class MetricFamilies(NamedTuple):
    """Makes metric families.

    Attributes:
        model: value of the label `model_name`.
    """

    model: str

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """A value that rises and falls."""
        return self.gauges(name, text, {(): value})

    def gauges(self, name: str, text: str, values: LabelledValues, *labels: str) -> Metric:
        """Gauges by labels."""
        return self._filled(GaugeMetricFamily(name, text, labels=["model_name", *labels]), values)

    def counter(self, name: str, text: str, value: float) -> Metric:
        """A value that only rises; its name gets the suffix `_total`."""
        return self.counters(name, text, {(): value})

    def counters(self, name: str, text: str, values: LabelledValues, *labels: str) -> Metric:
        """Counters by labels."""
        return self._filled(CounterMetricFamily(name, text, labels=["model_name", *labels]), values)

    def histogram(self, name: str, text: str, values: Histogram) -> Metric:
        """A histogram with the buckets of the engine's own."""
        return self.histograms(name, text, {(): values})

    def histograms(self, name: str, text: str, values: Mapping[tuple[str, ...], Histogram], *labels: str) -> Metric:
        """Histograms by labels."""
        family = HistogramMetricFamily(name, text, labels=["model_name", *labels])
        for key, histogram in values.items():
            buckets = [(floatToGoString(bound), count) for bound, count in histogram.cumulative]
            family.add_metric([self.model, *key], buckets, histogram.total)
        return family

    def info(self, name: str, text: str, values: Mapping[str, object]) -> Metric:
        """Constants as labels; the name gets the suffix `_info`."""
        family = InfoMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model], {key: str(value) for key, value in values.items()})
        return family

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: LabelledValues) -> Metric:
        for key, value in values.items():
            family.add_metric([self.model, *key], value)
        return family
