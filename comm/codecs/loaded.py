"""The choice of the codecs' kernels: the compiled ones, or without numba those in numpy, which only decode."""

from importlib import import_module
from threading import RLock
from typing import Any

from atoll.comm.extras import installed

one_compiles = RLock()  # who needs a kernel that another thread is compiling waits for it


class Kernels:
    """The kernels of the module `atoll.comm.codecs.NAME`, each compiled when it is first asked for.

    The module is imported then, too: numba takes a second, and an operator's machine need not have it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        with one_compiles:
            if name not in self.__dict__:
                setattr(self, name, self._load(name))
            return self.__dict__[name]

    def _load(self, name: str) -> Any:
        if not installed("numba"):
            return getattr(import_module("atoll.comm.codecs.numpy_kernels"), name)
        from atoll.comm.codecs.kernels import SIGNATURES, compiled

        found = getattr(import_module(f"atoll.comm.codecs.{self._name}"), name)
        return compiled(found) if callable(found) and found in SIGNATURES else found
