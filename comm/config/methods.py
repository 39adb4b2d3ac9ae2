"""Settings of a method that real nodes carry out, and those that only a simulation does."""

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError


def simulated_only(config: RunConfig) -> list[str]:
    """The settings that `atoll simulate` carries out and a run of real nodes does not yet, as key=value."""
    found = list[str]()
    if config.fragments.count > 1 and config.fragments.stagger and config.rounds.data_parallel:
        turns = f"with fragments.count={config.fragments.count}"
        found.append(f"rounds.data_parallel={config.rounds.data_parallel} {turns}")
    return found


def undefended(config: RunConfig) -> str:
    """What the run does without that keeps one member from moving it as far as it likes, in a sentence; empty:
    nothing."""
    security = config.security
    off = [
        *(["outer.clip=false"] if not config.outer.clip else []),
        *(["security.outliers=false"] if config.outer.clip and not security.outliers else []),
        *(["security.weight_bound=0"] if not security.weight_bound else []),
        *(["security.audit=0"] if security.audits == 0 else []),
    ]
    return f"{', '.join(off)}: invite only whom you trust, one member can spoil this run" if off else ""


def check_real(config: RunConfig) -> None:
    """Refuse what real nodes would silently ignore."""
    if found := simulated_only(config):
        raise ConfigError(
            f"{', '.join(found)}: only `atoll simulate` carries this out so far. Leave it out to train on nodes, "
            "or let a run without fragments take these rounds, and begin with its checkpoint (init_from)"
        )
    count, steps = config.fragments.count, config.rounds.inner_steps
    if config.fragments.stagger and count > steps:
        raise ConfigError(
            f"fragments.count is {count} and rounds.inner_steps {steps}: from one fragment's exchange to the next "
            f"there is a step at least, so set fragments.count={steps} or less"
        )
