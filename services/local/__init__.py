"""A whole cluster on one machine, as child processes. Knows commands and sockets, no role's inside.

cluster     starts worker, engine and gateway, waits until they are ready, stops them in order
child       the first lines of a child process: it ends when its parent does
demo        fetches the demo model once
"""
