"""What researchers watch a run by: each round's figures, in wandb, TensorBoard or JSON lines."""
