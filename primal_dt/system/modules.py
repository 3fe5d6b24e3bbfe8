"""Modules that a user names."""

import importlib
import os
import sys
from types import ModuleType

__all__ = ["import_from_here"]


def import_from_here(module: str) -> ModuleType:
    """Import a module that is installed or in the working folder, which is on the path of ``python -m`` only."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(module)
