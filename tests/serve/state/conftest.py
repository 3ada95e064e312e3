"""A server for tests of what is stored through one, and databases."""

from tests.support.served import empty_tables as empty_tables
from tests.support.served import gate as gate
from tests.support.served import scripted as scripted
from tests.support.served import served as served
from tests.support.served import shared_server as shared_server
from tests.support.served import state_path as state_path
from tests.support.served import state_url as state_url
