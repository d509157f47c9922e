"""The load generator with named workloads: `triptych bench` against any OpenAI-compatible server.

__main__   python -m tests.bench.load
workloads  W1 to W6, and one measured run of one of them
table      rows as Markdown

What it does on the wire is services/cli/load.py, what it works out services/cli/figures.py.
"""
