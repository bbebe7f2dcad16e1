"""`mdps gpu-check`: every backend that loads on a machine beside the torch oracle, with latency, rate and memory.

`items` lists the work in the order of its value, `run` does what fits into the minutes, each piece in a process of its
own; `prepare` makes checkpoints, bundles, the oracle's arrays and plans; `checked` is what a backend's process does;
`report` writes what is known after every piece. `kit` packs all of it for a machine without a network.
"""
