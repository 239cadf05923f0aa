"""Python in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def python(
    *arguments: object, variables: Mapping[str, str] = MappingProxyType({}), **options: Any
) -> "subprocess.CompletedProcess[str]":
    """What it said and how it ended; `variables` are added to the environment."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, **options)
