"""LangChain's structured output. Argument: its method. Prints the object that it makes."""

# pyright: reportMissingImports=false
import os
import sys
from typing import Any, Literal

from langchain_openai import ChatOpenAI
from price_tools import QUESTIONS, report
from pydantic import BaseModel


class Price(BaseModel):
    """What something costs."""

    item: str
    dollars: int
    kind: Literal["new", "used"]


method: Any = sys.argv[1]
structured: Any = ChatOpenAI(model=os.environ["MODEL"]).with_structured_output(Price, method=method)
report(structured.invoke(QUESTIONS[0]).model_dump_json())
