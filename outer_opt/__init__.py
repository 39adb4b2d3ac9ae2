"""The DiLoCo family as mathematics on arrays: small pieces that compose into any of its methods.

| file | what it decides |
|---|---|
| `nesterov`, `sgd` | the rule: how the anchor moves by the mean delta |
| `ramp` | the rule's coefficients over rounds, and when a round has more or fewer steps than usual |
| `weights`, `merge` | how the members' deltas become one |
| `late` | how much of a delta counts that was computed from an old anchor |
| `tensors`, `fragments` | which parts of the flat vector are exchanged together, and after which inner steps |
| `feedback` | what the wire lost is sent again; it moves on commit only |
| `overlap` | how a node that trained on during the exchange takes the new anchor |

Arrays are contiguous numpy arrays or torch tensors on the CPU, and are changed in place. Each line is one IEEE
operation an element, rounded once and never fused, so both kinds give the same bits on every machine.
A delta is anchor minus local parameters: it points uphill, as a gradient does.
"""
