"""The peak of a card is found by the name that its driver gives, and of what is not known nothing is said."""

import pytest

from atoll.comm.accelerators import peak_flops


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("Tesla V100-SXM2-16GB", 125),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_a_cards_peak_is_that_of_its_kind(name: str, tera: float) -> None:
    assert peak_flops(name) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA RTX A1000",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce GTX 1080",
    ],
)
def test_of_a_part_of_a_card_and_of_an_unknown_one_nothing_is_said(name: str) -> None:
    assert peak_flops(name) is None
