"""The rooms of the house: which folder may import which, as docs/architecture.md draws it, by which door others
come into a room, and where torch is."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("comm", "configs", "coordinator", "node", "outer_opt")
COMMANDS = (
    "comm.cli",
    "coordinator.cli",
    "coordinator.server",
    "node.cli",
    "node.doctor",
)  # loose files above their package's rooms
WITH_TORCH = {"node.engines", "node.participant", "node.trainer", "node.simulate"}

# A room is a folder in a package, or what lies loose in one; outer_opt and configs are one room each.
MAY_IMPORT: dict[str, set[str]] = {
    "configs": set(),
    "outer_opt": set(),
    "comm": set(),
    "comm.proto": {"comm"},
    "comm.cli": {"comm"},
    "comm.config": {"comm", "configs"},
    "comm.codecs": {"comm", "comm.config"},
    "comm.transport": {"comm", "comm.codecs"},
    "comm.allreduce": {"comm", "comm.codecs", "comm.transport"},
    "coordinator.door": {"comm"},
    "coordinator.placement": {"comm"},
    "coordinator.causes": {"comm"},
    "coordinator.state_machine": {
        *("comm", "comm.config", "comm.transport", "coordinator.causes", "coordinator.placement"),
        "outer_opt",
    },
    "coordinator.history": {"comm", "comm.codecs", "coordinator.causes", "coordinator.state_machine"},
    "coordinator.service": {
        *("comm", "comm.config", "comm.proto", "comm.transport"),
        *("coordinator.causes", "coordinator.door", "coordinator.history", "coordinator.state_machine"),
    },
    "coordinator.monitor": {
        *("comm", "comm.config", "coordinator.causes"),
        *("coordinator.history", "coordinator.service", "coordinator.state_machine"),
    },
    "coordinator.tracking": {
        *("comm", "comm.config"),
        *("coordinator.history", "coordinator.service", "coordinator.state_machine"),
    },
    "coordinator.server": {
        *("comm", "comm.config", "comm.transport", "coordinator.door", "coordinator.monitor"),
        *("coordinator.service", "coordinator.state_machine", "coordinator.tracking"),
    },
    "coordinator.cli": {
        *("comm", "comm.config", "coordinator.history", "coordinator.monitor", "coordinator.server"),
        *("coordinator.service", "coordinator.tracking"),
    },
    "coordinator.demo": {
        *("comm", "comm.codecs", "comm.config", "configs", "coordinator.cli", "coordinator.server"),
        *("coordinator.monitor", "coordinator.service", "coordinator.state_machine", "coordinator.tracking"),
    },
    "coordinator.bench": {
        *("comm", "comm.proto", "comm.transport", "configs"),
        *("coordinator.placement", "coordinator.server"),
    },
    "node": {"comm", "comm.config"},
    "node.data": {"comm", "comm.config", "node"},
    "node.state_machine": {"comm", "comm.proto", "node"},
    "node.control": {"comm", "comm.allreduce", "comm.config", "comm.proto", "comm.transport"},
    "node.manners": {"comm", "comm.config", "node"},
    "node.outer": {"comm", "comm.allreduce", "comm.codecs", "comm.config", "node", "outer_opt"},
    "node.checkpoint": {"comm", "comm.codecs", "comm.config", "node.outer"},
    "node.recovery": {"comm", "comm.codecs", "comm.transport", "node.outer"},
    "node.participant": {"comm", "comm.config", "node", "node.checkpoint", "node.data", "node.outer", "outer_opt"},
    "node.trainer": {"comm", "comm.config", "node", "node.data", "node.participant", "outer_opt"},
    "node.engines": {"comm", "comm.config", "node", "node.participant", "node.trainer"},
    "node.gateway": {"comm", "comm.transport"},
    "node.daemon": {
        *("comm", "comm.allreduce", "comm.codecs", "comm.config", "comm.proto", "comm.transport"),
        *("node", "node.checkpoint", "node.checks", "node.control", "node.data", "node.gateway", "node.manners"),
        *("node.outer", "node.recovery", "node.state_machine"),
    },
    "node.export": {"comm", "comm.config", "node.checkpoint", "node.data"},
    "node.service": {"comm", "node", "node.daemon", "node.outer"},
    "node.cli": {"comm", "node", "node.daemon", "node.service"},
    "node.checks": {
        *("comm", "comm.config", "comm.proto", "comm.transport"),
        *("node", "node.checkpoint", "node.control", "node.data", "node.outer"),
    },
    "node.doctor": {"comm", "node", "node.checks", "node.cli", "node.control", "node.daemon"},
    "node.simulate": {
        *("comm", "comm.codecs", "comm.config"),
        *("node", "node.data", "node.outer", "node.participant", "node.trainer", "outer_opt"),
    },
    "node.bench": {
        *("comm", "comm.allreduce", "comm.codecs", "comm.config", "comm.proto", "comm.transport"),
        *("node", "node.daemon", "node.outer", "node.recovery", "outer_opt"),
    },
}

# The door of a room: its modules that other rooms import. Nobody reaches through it to what is behind.
DOORS: dict[str, str] = {
    "outer_opt": "arrays clip damping feedback fragments merge nesterov outliers overlap robust_merge schedule "
    "sgd tensors weights",
    "comm": "accelerators addresses bitmap buffers build_info byte_view child_process chunks cores decode_errors "
    "descriptors digest durations errors evidence exit_codes extras faults files folders fragment_schedule "
    "gateway_note ids incidents invite leases log log_lines options pause_reasons peer_names phases plan "
    "rate_limits readiness receipts replace roster rounding signatures status_line strangers strikes terminal "
    "workers xdg",
    "comm.proto": "atoll_pb2 atoll_pb2_grpc checkup_pb2 checkup_pb2_grpc join_proof packed_plan report_stream",
    "comm.config": "beginning data engine hf hf_config load methods model model_source outer parameters plugin "
    "round_time rules run security shipped",
    "comm.codecs": "codec factory warm_up zstd",
    "comm.transport": "adaptive_zstd certificates connection data_plane fetch_client fetch_server frames key_ring "
    "path_tally peer_links stream_policy tls",
    "comm.allreduce": "auditor delta_encoder delta_samples input_signer listener reduction sealing",
    "coordinator.door": "front_door ports",
    "coordinator.history": "archived_records record_archive record_codec record_store segment series",
    "coordinator.placement": "bandwidth_shares two_level",
    "coordinator.causes": "account explanation observations slowness verdict",
    "coordinator.state_machine": "conduct credit events inquiry members rollback run_layout state step weights",
    "coordinator.service": "control_plane event_loop failures goodput invites journal journaled_machine "
    "rulings run_records telemetry",
    "coordinator.monitor": "alarm blame contributions http replay run_answers terminal terminal_replay web "
    "webhook",
    "coordinator.tracking": "tracker view wandb_settings",
    "node": "config devices engine_check memory preflight settings state_files status_words top trainer_channel",
    "node.data": "dataset detokenise manifest samples source store",
    "node.state_machine": "effects events state step",
    "node.checks": "check machine needs reach",
    "node.control": "checkup client outbox reports round_account round_book",
    "node.gateway": "client",
    "node.manners": "byte_account limits may_train sensors",
    "node.outer": "layout method repair residual shared_vectors state vector_folders",
    "node.checkpoint": "checkpoint_files checkpointer disk_budget hf_adapters hf_layout initial_state "
    "run_manifest saved_run snapshots uploader",
    "node.recovery": "recovery",
    "node.participant": "batches daemon_link flat_vector idle_memory participant rank_group step_outcome",
    "node.trainer": "optimizer process unfinished_step writing",
    "node.daemon": "control_socket daemon join_checks reducer state_dir worker",
    "node.service": "detach installer join_command systemd uninstall",
}
# What imitates or measures a room takes it apart: modules behind the door that these rooms import as well.
WORKSHOPS = {"coordinator.bench", "node.bench", "node.simulate"}
PARTS: dict[str, str] = {
    "node.trainer": "loss model",
    "node.participant": "gradients lr_rewarm lr_schedule",
    "node.daemon": "outer_loop session state_server trainer_supervisor",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for top in PACKAGES for path in (ROOT / top).rglob("*.py")}


def room_of(module: str) -> str:
    if module in COMMANDS:
        return module
    package, *inside = module.split(".")
    in_a_folder = inside and (len(inside) > 1 or (ROOT / package / inside[0]).is_dir())
    return f"{package}.{inside[0]}" if in_a_folder else package


@cache
def imports(module: str) -> frozenset[str]:
    """Every module that `module` imports, at its top or in a function; ours without the `atoll.` before it."""
    found = set[str]()
    for statement in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                ours = f"{statement.module}.{alias.name}".removeprefix("atoll.")
                found.add(ours if ours in MODULES else statement.module.removeprefix("atoll."))
        elif isinstance(statement, ast.Import):
            found.update(alias.name.removeprefix("atoll.") for alias in statement.names)
    return frozenset(found)


def entered(room: str, by_workshops: bool) -> set[str]:
    """The modules of the room that other rooms import; a room that is one module has no door."""
    users = (m for m in MODULES if room_of(m) != room and (room_of(m) in WORKSHOPS) is by_workshops)
    inside = {other for m in users for other in imports(m) & MODULES.keys() if room_of(other) == room != other}
    return {other.removeprefix(f"{room}.") for other in inside}


def test_every_room_is_in_the_graph() -> None:
    assert {room_of(module) for module in MODULES if "." in module or module == "configs"} <= set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_the_graph_says(room: str) -> None:
    found = {
        (module, other)
        for module in MODULES
        if room_of(module) == room
        for other in map(room_of, imports(module) & MODULES.keys())
        if other != room
    }
    assert {(module, other) for module, other in found if other not in MAY_IMPORT[room]} == set()
    assert {other for _, other in found} == MAY_IMPORT[room], "the graph allows what nobody imports any more"


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_others_come_into_a_room_by_its_door(room: str) -> None:
    door, parts = set(DOORS.get(room, "").split()), set(PARTS.get(room, "").split())
    assert entered(room, by_workshops=False) == door
    assert entered(room, by_workshops=True) - door == parts


def test_neither_rooms_nor_modules_go_in_circles() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()
    TopologicalSorter({m: {o for o in imports(m) if o in MODULES and o != m} for m in MODULES}).prepare()


def test_torch_stays_in_its_rooms() -> None:
    with_torch = {m for m in MODULES for other in imports(m) if other.split(".")[0] == "torch"}
    assert {room_of(module) for module in with_torch} <= WITH_TORCH


@pytest.mark.parametrize(
    "module",
    [
        "atoll.coordinator.server",
        "atoll.coordinator.demo.command",
        "atoll.node.daemon.daemon",
        "atoll.node.export.command",
        "atoll.node.outer.method",
        "atoll.node.simulate.cli",
        "atoll.outer_opt.merge",
    ],
)
def test_service_and_daemon_and_commands_start_without_torch(module: str) -> None:
    probe = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", probe], timeout=60).returncode == 0
