"""Outer optimizers: rules and merges as mathematics on arrays."""
