"""The `triptych` command: a local cluster, the roles, clients and tools. Imports no torch.

__main__        the list of sub-commands
plan            the memory that serving a model takes
serve           worker, engine and gateway on this machine
role            one role, in this process
chat            a conversation in the terminal
complete        one text continued
top/            what a running cluster does, live
simulate/       the scheduler under a virtual clock
export_text     writes a model's text files
bench           measures an OpenAI-compatible server
reference       prints every knob of every role
own_worker      a worker that a command starts for itself
load            the closed loop behind bench
figures         times and counts of a run, and what they come to
prompts         prompts of an exact number of tokens
client          what chat and complete share: options, channel, errors
"""
