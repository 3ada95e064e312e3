"""Options that a start on a TPU refuses, and `attention=tpu` on a machine without one. No TPU runs here."""

import pytest

from jinfercept.errors import ConfigError
from jinfercept.startup import sizing
from jinfercept.startup.backend import start_backend
from jinfercept.startup.sizing import check_tables
from tests.support.tiny_model import tiny_llm


def test_tables_that_do_not_fit_are_refused_with_pages_that_do():
    check_tables(256, 8000, 16)
    with pytest.raises(ConfigError, match="page_size=256"):
        check_tables(256, 131_072, 16)
    check_tables(256, 131_072, 256)


def test_pages_in_int8_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizing, "INTERLEAVED_ON", ("cpu",))
    with pytest.raises(ConfigError, match="quantised pages are in fp8; got int8; fix: kv_cache_dtype fp8, or auto"):
        tiny_llm(kv_cache_dtype="int8", attention="reference")


def test_attention_of_tpus_is_refused_elsewhere():
    with pytest.raises(ConfigError, match="attention=tpu needs a TPU; got JAX on a cpu; fix: attention=auto"):
        start_backend("tpu")
