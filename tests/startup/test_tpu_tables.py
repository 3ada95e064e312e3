"""Page tables on TPUs, which lie in their scalar memory."""

import pytest

from jinfercept.errors import ConfigError
from jinfercept.startup.sizing import check_tables


def test_tables_that_do_not_fit_are_refused_with_pages_that_do():
    check_tables(256, 8000, 16)
    with pytest.raises(ConfigError, match="page_size=256"):
        check_tables(256, 131_072, 16)
    check_tables(256, 131_072, 256)
