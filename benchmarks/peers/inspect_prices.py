# pyright: basic, reportMissingImports=false
"""A task of Inspect for an interpreter that has `inspect-ai`: an agent looks prices up with a tool until it answers."""

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import Tool, tool


@tool
def price() -> Tool:
    async def execute(item: str) -> str:
        """The price of an item.

        Args:
            item: its name.
        """
        return f"{item}: 23"

    return execute


@task
def prices() -> Task:
    return Task(
        dataset=[
            Sample(input=f"How much is a {item}? Use the tool.", target="23") for item in ("lamp", "pen", "chair")
        ],
        solver=react(tools=[price()], submit=False),
        scorer=includes(),
        message_limit=8,
    )
