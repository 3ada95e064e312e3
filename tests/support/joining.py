"""Whether models are served with joined weights, whatever computes here."""

import pytest

from jinfercept.models import joined_weights, model


def set_joined(monkeypatch: pytest.MonkeyPatch, joined: bool) -> None:
    """As where kernels compute, or as where XLA computes everything on a CPU."""
    for module in (model, joined_weights):
        monkeypatch.setattr(module, "joins", lambda: joined)
