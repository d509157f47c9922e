"""Other servers beside ours, on the same model and machine, in turn: `make bench-peers`.

__main__   python -m tests.bench.peers: the rounds
report     medians and ratios, as tables and JSON
servers    which servers there are, and with which settings they do best
process    a server that runs: its start, its CPU time by role, its memory, its end
machine    what is measured on, and what else it does
"""
