"""The KV cache, as numbers: which block holds what for whom. Its rooms, top first:

manager    the cache as a resource of the scheduler: admission, prefix hits, block tables
naming     the names of a request's blocks
blocks     the pool: reference counts, the free queue, the prefix index
windows    what a KV group needs of the past, and how many blocks that takes
hashing    names for the content of full blocks
"""
