"""The KV cache, as numbers: which block holds what for whom. Its rooms, top first:

manager    the cache as a resource of the scheduler: admission, prefix hits, block tables
blocks     the pool: reference counts, the free queue, the prefix index
hashing    names for the content of full blocks
"""
