"""The DiLoCo family as mathematics on arrays: small pieces that compose into any of its methods.

| file | what it decides |
|---|---|
| `rule`: `nesterov`, `sgd` | how the anchor moves by the merged delta |
| `schedule` | which rule a round has: a warm-up, a decay, more or fewer inner steps than usual |
| `weights`, `clip`, `merge` | how the members' deltas become one |
| `damping` | how much of a delta counts that was computed from an old anchor |
| `tensors`, `fragments` | which parts of the flat vector are exchanged together, and after which inner steps |
| `feedback` | what the wire lost is sent again; it moves on commit only |
| `overlap` | how a node that trained on during the exchange takes the new anchor |
| `round` | nothing: one round of all of these, as an example and a measure |

Arrays are contiguous numpy arrays or torch tensors on the CPU, and are changed in place. Each line is one IEEE
operation an element, rounded once and never fused, so both kinds give the same bits on every machine.
A delta is anchor minus local parameters: it points uphill, as a gradient does.
"""
