"""The run's service: membership, rounds, ledger, journal, page and wandb."""
