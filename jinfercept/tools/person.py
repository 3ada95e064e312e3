"""A person as a tool: calls wait in an inbox."""

from typing import final

from jinfercept.tools.calls import CallRequest
from jinfercept.tools.inbox import Inbox
from jinfercept.tools.questions import QUESTION
from jinfercept.tools.schemas import check_of
from jinfercept.tools.tool_tables import PersonTable, Place


@final
class Person:
    """A person who answers calls in an inbox. Raises `ConfigError` for parameters that are not a JSON schema."""

    def __init__(self, table: PersonTable, place: Place, inbox: Inbox) -> None:
        self._name, self._inbox = table.name, inbox
        inbox.tools |= {table.name}
        self.parameters = table.parameters or QUESTION
        self._check = check_of(self.parameters, place)

    async def __call__(self, request: CallRequest) -> str:
        """The answer of the person. Raises `CallFailed` if the call is declined."""
        self._check(request.arguments)
        return await self._inbox.ask(self._name, request)
