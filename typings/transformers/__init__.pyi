# In place of the package for the type checker, which would read 2,700 files of transformers three times for four names.
from typing import Any

def __getattr__(name: str) -> Any: ...
