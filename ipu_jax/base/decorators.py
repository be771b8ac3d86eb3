"""Decorate what users call: name the argument that was meant, keep tracebacks short, and leave `jax.set_mesh` outside.

    user's call -> pipeline.value_and_grad -> 13 frames of ours -> user's stage

Of our frames only the first stays: the method that the user called. jax removes its own frames. Set jax's option
`jax_traceback_filtering` to "off" to see all frames. Nothing here imports jax.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import numpy as np

from ipu_jax.base import status
from ipu_jax.base.checks import nearest
from ipu_jax.base.other_words import names_here

_T = TypeVar("_T")
_OURS: Final = "ipu_jax"
_HIDDEN: Final = (_OURS, "jax", "jaxlib", "contextlib", "functools")  # our frames call each other through these
_UNEXPECTED: Final = re.compile(r"got an unexpected keyword argument '(\w+)'")
_OTHER_MESH: Final = re.compile("Context mesh .* should match the mesh of sharding|Mesh for all inputs should be equal")
OTHER_MESH: Final = (
    "a function closes over {}, and runs on the mesh of the IPUs: let it close over np.asarray(array), or give it "
    "as a frozen weight"
)


def public(called: _T) -> _T:
    """Decorate a function or a class: an unknown argument is answered by its name, and tracebacks are short."""
    return _decorated(called, contextlib.nullcontext)


def public_on_mesh(called: _T) -> _T:
    """Decorate what uses a mesh of its own, and so ignores the mesh that `jax.set_mesh` names around the call.

    Of a class, its public methods are decorated, too.
    """
    if isinstance(called, type):
        for name, method in [*vars(called).items()]:
            if isinstance(method, types.FunctionType) and (name == "__call__" or not name.startswith("_")):
                setattr(called, name, public_on_mesh(method))
            elif isinstance(method, classmethod):
                setattr(called, name, classmethod(public_on_mesh(method.__func__)))
    return _decorated(called, _without_context_mesh)


def _decorated(called: Any, context: Callable[[], Any]) -> Any:
    if isinstance(called, type):
        if "__init__" in vars(called):
            called.__init__ = _decorated(called.__init__, context)
        return called

    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with context(), status.SILENT:
                return called(*args, **kwargs)
        except Exception as error:
            if isinstance(error, TypeError):
                _name_argument(error, called, args)
            if isinstance(error, ValueError) and _OTHER_MESH.search(str(error)):
                error.args = (OTHER_MESH.format("an array on another mesh"),)
            _shorten(error)
            raise  # without a frame of this function

    return call


users_mesh: contextvars.ContextVar[Any] = contextvars.ContextVar("users_mesh", default=None)
"""The abstract mesh that `jax.set_mesh` names around a public call, or None."""


@contextlib.contextmanager
def _without_context_mesh() -> Iterator[None]:
    jax = sys.modules["jax"]
    mesh, without = jax.sharding.get_abstract_mesh(), contextlib.nullcontext()
    if mesh.empty:  # one public call inside another
        yield
        return
    with contextlib.suppress(ValueError):  # inside `jax.jit`: see `check_context_mesh`
        without = jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))
    token = users_mesh.set(mesh)
    try:
        with without:
            yield
    finally:
        users_mesh.reset(token)


def _name_argument(error: TypeError, called: Any, args: tuple[Any, ...]) -> None:
    """Say in an error about arguments which public name was called, and which argument was meant."""
    if any(_package(entry) not in ("contextlib", "functools") for entry in _entries(error)):
        return  # not about the arguments of this call
    name = called.__qualname__
    if "." in name and args and called.__name__ in dir(args[0]):  # a method, perhaps of a private base
        owner = (args[0] if isinstance(args[0], type) else type(args[0])).__name__
        name = owner if called.__name__ in ("__init__", "__call__") else f"{owner}.{called.__name__}"
    error.args = (f"{name}(){str(error).partition('()')[2]}",)
    unexpected = _UNEXPECTED.search(str(error))
    if unexpected is None:
        return
    word, parameters = unexpected[1], inspect.signature(called).parameters.values()
    named = (p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    known = {p.name: p.annotation for p in named if p.name not in ("self", "cls")}
    error.args = (f"{name}() got an unexpected keyword argument {word!r}: {_meant(word, known)}",)


def _meant(word: str, known: dict[str, Any]) -> str:
    """Return which argument of those that a call takes, or which option among them, was meant by a word."""
    named = names_here(word)
    called_here = next((text or f"it is called {name!r} here" for name, text in named if name in known), "")
    classes: Any = [(at, k) for at, kind in known.items() for k in typing.get_args(kind) if dataclasses.is_dataclass(k)]
    of_options = (
        f"give {at}={kind.__name__}({name}=...)"
        for name, text in [(word, ""), *named]
        for at, kind in classes
        if not text and _is_optional(kind, name)
    )
    return called_here or next(of_options, "") or nearest(word, known) or f"it takes {', '.join(known)}"


def _is_optional(options: type, word: str) -> bool:
    """Return whether a dataclass can be made with this argument alone."""
    try:
        inspect.signature(options).bind(**{word: None})
    except TypeError:
        return False
    return True


def _shorten(error: Exception) -> None:
    """Leave, below the decorator, the function that was called and the frames of users' files."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.values["jax_traceback_filtering"] == "off":
        return
    entries = _entries(error)
    first = next((entry for entry in entries if _package(entry) == _OURS), None)
    users = [entry for entry in entries if _package(entry) not in _HIDDEN]
    is_fault = isinstance(error, (AssertionError, AttributeError, LookupError, NameError, RecursionError))
    if not users and is_fault and not type(error).__module__.startswith(_OURS):
        return  # a fault of ours: whoever reports it needs all frames
    shortened: types.TracebackType | None = None
    for entry in reversed([entry for entry in entries if entry is first or entry in users]):
        shortened = types.TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = shortened


def _entries(error: Exception) -> list[types.TracebackType]:
    """Return the entries of a traceback below the decorator's."""
    entries = [error.__traceback__]
    while entries[-1] is not None:
        entries.append(entries[-1].tb_next)
    return [entry for entry in entries[1:] if entry is not None]


def _package(entry: types.TracebackType) -> str:
    return entry.tb_frame.f_globals.get("__name__", "").partition(".")[0]
