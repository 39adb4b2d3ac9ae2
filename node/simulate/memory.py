"""The memory that a simulation takes, asked for before it begins."""

from atoll.comm.config.run import RunConfig
from atoll.node.preflight import PROCESS_BYTES, demand_memory

# Parameters, gradients, two moments; what was sent, and as the others decode it.
BYTES_SIMULATED = 16 + 8
BYTES_SHARED = 16  # anchor and momentum; the parameters of the start and of the evaluator


def check_simulation(run: RunConfig, nodes: int) -> None:
    """Raise `ResourceError` if the models of so many nodes cannot fit into this one process."""
    params = run.model.n_params
    each = BYTES_SIMULATED + (8 if run.outer.feedback else 0)  # what was not sent, and what was offered
    who = f"simulating {nodes} nodes with a model of {params:,} parameters"
    demand_memory(
        params * (nodes * each + BYTES_SHARED) + PROCESS_BYTES, who, "take fewer nodes, or a smaller model"
    )
