"""Python functions as tools of a file: looked up by name, declared by their signatures."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jinfercept.calls import Tool
from jinfercept.chat.function_tools import ChatTool, chat_tools
from jinfercept.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class PythonTool:
    """A Python function.

    Attributes:
        declaration: OpenAI's.
        function: of the arguments as JSON.
        max_concurrency: calls that run at once; None: the default.
    """

    declaration: Mapping[str, Any]
    function: Callable[[str], object]
    max_concurrency: int | None = None


def python_tools(tools: Iterable[Mapping[str, Any]], folder: Path) -> list[PythonTool]:
    """The functions that are named.

    Args:
        tools: each a `file`, all of whose functions are tools, or the fields of a `PythonTable` with its `place`.
        folder: to which paths of files are relative.

    Raises:
        RequestError: a file cannot be run, a function cannot be a tool, or two have one name.
        ConfigError: there is no such function.
    """
    modules, made = dict[Path, ModuleType](), list[PythonTool]()
    for tool in tools:
        if "file" in tool:
            in_file = chat_tools(load_functions(folder / tool["file"]))
            made += [PythonTool(each.declaration, each.tool.function) for each in in_file if each.tool is not None]
        else:
            made.append(_of_table(tool, folder, modules))
    chat_tools([ChatTool(tool.declaration, None) for tool in made])
    return made


def _of_table(table: Mapping[str, Any], folder: Path, modules: dict[Path, ModuleType]) -> PythonTool:
    home, _, name = table["function"].rpartition(":")
    try:
        function = getattr(_module(home, folder, modules), name)
        [chat_tool] = chat_tools([Tool(function, name=table["name"] or name)])
    except (ImportError, AttributeError) as error:
        what = f"{table['place']}: there is no such function: {error}"
        raise ConfigError(what, got=table["function"], fix="name one that is there") from error
    except RequestError as error:
        raise ConfigError(f"{table['place']}: {error.what}", got=error.got, fix=error.fix) from error
    assert chat_tool.tool is not None
    declared = dict(chat_tool.declaration["function"])
    declared |= {key: table[key] for key in ("description", "parameters") if table[key] is not None}
    return PythonTool({"type": "function", "function": declared}, chat_tool.tool.function, table["max_concurrency"])


def _module(home: str, folder: Path, modules: dict[Path, ModuleType]) -> ModuleType:
    if not home.endswith(".py"):
        return importlib.import_module(home)
    path = folder / home
    if path not in modules:
        modules[path] = load_module(path)
    return modules[path]


def load_functions(path: Path) -> list[Callable[..., object]]:
    """The public functions that a Python file defines and documents, to be called by a model. The file is run.

    Raises:
        RequestError: the file cannot be run, or has no such function.
    """
    module = load_module(path)
    functions = [
        value
        for key, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not key.startswith("_")
        and inspect.getdoc(value)
    ]
    if not functions:
        raise RequestError("the file defines no tool", got=path, fix="define functions with docstrings in it")
    return functions


def load_module(path: Path) -> ModuleType:
    """Run a Python file of tools. Raises `RequestError` if that fails."""
    name = f"jinfercept_tools_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file():
        raise RequestError("there is no such file of tools", got=path, fix="give the path of one that is there")
    if spec is None or spec.loader is None:
        raise RequestError("tools need a Python file", got=path, fix="give the path of a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where the annotations of its functions are looked up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the file is the user's
        problem = f"{_line_of(error, path)}: {type(error).__name__}: {error}"
        raise RequestError("running the file failed", got=problem, fix="correct it; it is run as it is") from error
    return module


def _line_of(error: BaseException, path: Path) -> str:
    """File and line: where the file's text is wrong, or the last line of it that ran."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}, line {error.lineno}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.absolute()
    ]
    return f"{path}, line {lines[-1]}" if lines else str(path)
