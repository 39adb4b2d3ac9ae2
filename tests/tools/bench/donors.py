"""`atoll bench recovery` over emulated links: how much of its link a receiver uses, and what a death costs.

python -m bench.donors [--up MBIT] [--rtt MS] [--kill donor|receiver]
"""

import json

import click
from bench.command import ask
from bench.wan import Wan

PATIENCE = 300.0  # seconds


@click.command()
@click.option("--donors", default=4, show_default=True)
@click.option("--numel", default=25_000_000, show_default=True)
@click.option("--down", default=100.0, show_default=True, help="Mbit/s of the receiver.")
@click.option("--up", default=100.0, show_default=True, help="Mbit/s of each donor.")
@click.option("--rtt", default=50.0, show_default=True, help="Milliseconds.")
@click.option("--kill", type=click.Choice(["donor", "receiver"]))
def main(donors: int, numel: int, down: float, up: float, rtt: float, kill: str | None) -> None:
    """Print what the command says, as JSON, and the share of the link with all headers."""
    with Wan(donors + 1, up=down, down=down, rtt=rtt) as wan:
        for i in range(1, donors + 1):
            wan.set(i, up=up)
        words = [
            "bench",
            "recovery",
            "--donors",
            str(donors),
            "--numel",
            str(numel),
            "--link",
            str(down),
            "--json",
        ]
        words += ["--host", wan.host_template, "--launch-prefix", wan.launch_template]
        told = ask(words + (["--kill", kill] if kill else []), PATIENCE)
        on_the_wire = wan.stat().nodes[donors].rx
    if not kill:
        told["link_share_on_the_wire"] = on_the_wire * 8e-6 / down / told["seconds"]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
