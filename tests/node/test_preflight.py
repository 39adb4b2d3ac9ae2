"""What this machine lacks is said before anything is started."""

import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from atoll.comm.config.data import DataConfig, DataKind, DataSetConfig
from atoll.comm.config.hf import HfConfig
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.outer import OverlapConfig
from atoll.comm.config.run import CheckpointConfig, CodecName, InnerConfig, OptimizerName, ReduceConfig, RunConfig
from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node import preflight
from atoll.node.config import Device, NodeConfig, check
from atoll.node.data.dataset import check_data_sets, open_data_sets
from atoll.node.data.manifest import MANIFEST
from atoll.node.devices import Gpu
from atoll.node.preflight import (
    beginning_out_of_reach,
    check_congestion,
    check_device,
    check_memory,
    check_network,
    check_stores,
)

ON_CPU = NodeConfig(device=Device.CPU, ranks=1, durable=False)
KERNEL = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def test_a_congestion_control_that_the_kernel_lacks_is_refused_with_those_it_has() -> None:
    offered = KERNEL.read_text().split()
    check_congestion("")
    check_congestion(offered[0])
    with pytest.raises(ConfigError, match=f"congestion=warp: this machine's kernel offers {offered[0]}"):
        check_congestion("warp")


def test_a_rendezvous_that_is_not_this_machines_or_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host in (f"127.0.0.1:{taken.getsockname()[1]}", "192.0.2.1:29400"):
            with pytest.raises(ConfigError, match=f"rendezvous={host}: this machine cannot listen there"):
                check_network(NodeConfig(machines=2, rendezvous=host))
    check_network(NodeConfig())


def test_a_gpu_is_not_asked_of_a_torch_that_can_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "torch_has_gpus", lambda: False)
    check_device(NodeConfig())
    with pytest.raises(ConfigError, match="device=cuda and this machine's torch is built for CPUs"):
        check_device(NodeConfig(device=Device.CUDA))


@pytest.mark.parametrize(("codec", "each"), [(CodecName.INT8, 30), (CodecName.FP32, 36)])
def test_a_model_that_does_not_fit_is_refused_by_what_its_wire_needs_too(
    codec: CodecName, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunConfig(reduce=ReduceConfig(codec=codec))
    need = each * run.model.n_params + preflight.PROCESS_BYTES
    monkeypatch.setattr(preflight, "available", lambda: need + 200_000)
    check_memory(run, ON_CPU, [])
    monkeypatch.setattr(preflight, "available", lambda: need - 200_000)
    check_memory(run, replace(ON_CPU, device=Device.CUDA), [])
    with pytest.raises(ResourceError, match="needs about"):
        check_memory(run, ON_CPU, [])


def test_a_batch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ResourceError, match="a batch of 128,000,000,000,000 tokens needs about 30720000.0 GB"):
        check_memory(RunConfig(inner=InnerConfig(batch_size=10**12)), ON_CPU, [])


def needed(run: RunConfig, node: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of host memory a parameter that the run needs on the node."""
    monkeypatch.setattr(preflight, "PROCESS_BYTES", 0)
    monkeypatch.setattr(preflight, "available", lambda: 1 << 24)
    run = replace(run, model=ModelConfig(dim=1024, layers=64, ffn_dim=4096))
    with pytest.raises(ResourceError) as refused:
        check_memory(run, node, [Gpu("", 1 << 60)])
    return round(float(str(refused.value).partition("needs about ")[2].split()[0]) * 1e9 / run.model.n_params)


def test_every_copy_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of int8's 12 bytes of flat vectors and 2 encoded ones of 1 byte."""
    run, sgd = RunConfig(), RunConfig(inner=InnerConfig(optimizer=OptimizerName.SGD))
    on_gpu = replace(ON_CPU, device=Device.CUDA)
    assert needed(run, ON_CPU, monkeypatch) == 14 + 16
    assert needed(run, on_gpu, monkeypatch) == 14
    assert needed(sgd, ON_CPU, monkeypatch) == 14 + 8
    kept = replace(on_gpu, durable=True)
    assert needed(run, replace(kept, copy_interval=0.0), monkeypatch) == 14 + 8  # the moments', for the disk
    assert needed(run, kept, monkeypatch) == 14 + 8 + 4  # and the parameters', within a round
    assert needed(sgd, kept, monkeypatch) == 14 + 4
    overlapped = RunConfig(overlap=OverlapConfig(delay=5))
    assert needed(overlapped, on_gpu, monkeypatch) == 14 + 8


def test_a_model_must_fit_into_the_memory_of_the_gpus_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig()
    monkeypatch.setattr(preflight, "available", lambda: 1 << 40)
    need = 16 * run.model.n_params
    two = replace(ON_CPU, device=Device.CUDA, ranks=2)
    found = [Gpu("", need // 2), Gpu("", need // 2 + 1), Gpu("", 1)]
    check_memory(run, two, found)
    check_memory(run, ON_CPU, found)
    with pytest.raises(ResourceError, match="0.0 GB of GPU memory a rank, each of this node's 3 GPUs has 0.0 GB"):
        check_memory(run, replace(two, ranks=3), found)
    with pytest.raises(ResourceError, match="this node's GPU has"):
        check_memory(run, replace(two, ranks=1), found)


def test_a_beginning_in_files_is_said_at_the_join_where_it_cannot_be_read(tmp_path: Path) -> None:
    def said(place: str, files: bool) -> str:
        return beginning_out_of_reach(RunConfig(init_from=place), NodeConfig(files=files))

    for place in ("weights", str(tmp_path), f"file://{tmp_path}"):
        assert "the node has files=true" in said(place, files=False)
    assert said("weights/none", files=True).startswith(
        f"init_from=weights/none: this machine has no {Path.cwd()}/weights"
    )
    for place, files in (("", False), (str(tmp_path), True), ("s3://bucket/x", False), ("hf://org/name", False)):
        assert said(place, files) == ""


@pytest.mark.parametrize(
    ("url", "stores", "allowed"),
    [
        ("s3://bucket/run", (), True),
        ("s3://bucket/run", ("s3://bucket/",), True),
        ("s3://bucket/run", ("hf://", "s3://bucket"), True),
        ("s3://bucket", ("s3://bucket",), True),
        ("hf://org/name@main", ("hf://",), True),
        ("https://data.example.org/set?signature=1", ("https://data.example.org/set",), True),
        ("s3://buckets/run", ("s3://bucket",), False),
        ("https://data.example.org@evil.example/set", ("https://data.example.org",), False),
        ("https://evil.example/?https://data.example.org/", ("https://data.example.org",), False),
        ("s3://bucket/ours/%2e%2e/others", ("s3://bucket/ours",), False),
        ("s3://bucket/ours\\..\\others", ("s3://bucket/ours",), False),
        ("s3://bucket/ours::https://evil.example/", ("s3://bucket/ours",), False),
        ("https://data.example.org/pub/.\t./private/x", ("https://data.example.org/pub/",), False),
        ("https://data.example.org/pub/#/../x", ("https://data.example.org/pub/",), False),
        ("hf://org/name@refs/pr/7", ("hf://org/",), False),
        ("hf://org/name@refs/pr/7", ("hf://org/name@refs/pr/7",), True),
    ],
)
def test_a_run_uses_no_store_but_those_that_the_nodes_owner_allows(
    url: str, stores: tuple[str, ...], allowed: bool
) -> None:
    node = NodeConfig(stores=list(stores))
    data = RunConfig(data=DataConfig(DataKind.DATASET, mixture=[DataSetConfig(url, "0" * 32)]))
    remote, hf = RunConfig(checkpoint=CheckpointConfig(remote=url)), RunConfig(hf=HfConfig(base=url))
    beginning = beginning_out_of_reach(RunConfig(init_from=url), node)
    checks = (
        *(partial(check_stores, run, node) for run in (remote, hf)),
        partial(check_data_sets, data, node),
        partial(node.demand_store, "init_from", url),
    )
    if allowed:
        assert beginning == ""
        check_stores(remote, node)
        return
    assert "this node's owner allows stores=" in beginning and beginning.endswith("cannot be the run's first")
    for check_ in checks:
        with pytest.raises(ResourceError, match="this node's owner allows stores="):
            check_()


def test_stores_that_a_node_does_not_use_need_nobodys_leave(tmp_path: Path) -> None:
    node, elsewhere = NodeConfig(stores=["s3://bucket/"]), "https://data.example.org/x"
    check_stores(RunConfig(checkpoint=CheckpointConfig(remote=elsewhere)), replace(node, durable=False))
    check_stores(RunConfig(hf=HfConfig(base=elsewhere)), replace(node, base=str(tmp_path)))
    node.demand_store("init_from", "/weights")  # a file of this machine's, which is files= to allow
    (tmp_path / MANIFEST).write_bytes(b"{}")
    own = DataSetConfig(elsewhere, digest(b"{}").hex())
    mine = replace(node, data=str(tmp_path))
    check_data_sets(RunConfig(data=DataConfig(DataKind.DATASET, mixture=[own])), mine)
    other = DataSetConfig(elsewhere, "0" * 32)
    both = RunConfig(data=DataConfig(DataKind.DATASET, mixture=[own, other]))
    for check_ in (partial(check_data_sets, both, mine), partial(open_data_sets, both, mine, tmp_path / "cache")):
        with pytest.raises(ResourceError, match="allows stores="):
            check_()


def test_a_beginning_of_stores_is_a_urls() -> None:
    check(NodeConfig(stores=["s3://bucket/"]))
    with pytest.raises(ConfigError, match="write beginnings of URLs"):
        check(NodeConfig(stores=["bucket"]))
