"""The rooms of the house: which folder may import which, as docs/architecture.md draws it; torch stays in two of them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("comm", "configs", "coordinator", "node", "outer_opt")

# A room is a folder in one of the packages, or what lies loose in one of them; `outer_opt` and `configs` are one each.
ROOMS: dict[str, set[str]] = {
    "configs": set(),
    "outer_opt": set(),
    "comm": {"comm.codecs", "comm.transport"},
    "comm.config": {"comm", "configs"},
    "comm.codecs": {"comm", "comm.config"},
    "comm.transport": {"comm", "comm.codecs"},
    "comm.allreduce": {"comm", "comm.codecs", "comm.transport"},
    "comm.proto": set(),
    "coordinator.placement": {"comm"},
    "coordinator.state_machine": {"comm", "comm.config", "comm.transport", "coordinator.placement"},
    "coordinator.service": {"comm", "comm.config", "comm.proto", "comm.transport", "coordinator.state_machine"},
    "coordinator.monitor": {"comm.config", "coordinator.service", "coordinator.state_machine"},
    "coordinator": {
        *("comm", "comm.config", "comm.transport"),
        *("coordinator.monitor", "coordinator.service", "coordinator.state_machine"),
    },
    "coordinator.demo": {
        *("comm", "comm.config", "configs", "coordinator"),
        *("coordinator.monitor", "coordinator.service", "coordinator.state_machine"),
    },
    "coordinator.bench": {
        *("comm", "comm.proto", "comm.transport", "configs"),
        *("coordinator", "coordinator.placement"),
    },
    "node": set(),
}
