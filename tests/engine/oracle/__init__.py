"""A second implementation of the engine's schedule, written from docs/scheduling.md alone: simple and slow.

Every rule is worked out anew each time it is asked: plain lists, sorted whenever an order is wanted, sums
over all running choices, blocks named by all their tokens. It shares no code with the engine but the
request as it is asked (RequestSpec) and the numbers (CoreConfig). Its rooms, top first:

oracle     one step after another: submit, schedule, apply, abort
order      the line, the rank of the running, the shares of tenants
pool       blocks: the free queue, the prefix cache, what is available
encoder    media: time in a step, and room
choice     what the oracle knows of a request
workload   random requests and pools to try it on
lockstep   the engine and the oracle side by side, compared after every call
"""
