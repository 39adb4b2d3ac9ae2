"""The node as a pure state machine: `step(state, event) -> (state, effects)`."""
