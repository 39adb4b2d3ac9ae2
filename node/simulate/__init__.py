"""`atoll simulate`: a run of many nodes in one process, on a virtual clock.

The model, the data, the inner optimizers, the codecs and `outer_opt` are those of a real run. What is simulated is
time, the network and who is there: `fleet` decides in which order things happen, `learner` takes inner steps,
`exchange` takes a fragment's deltas over the wire and back, `simulation` runs it all and the data-parallel
baseline.
"""
