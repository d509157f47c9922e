"""Products of a mixture of experts: reference, triton. Tokens lie sorted by expert; the router has chosen.

sort_by_expert -> grouped product, which gathers tokens -> activation -> grouped product -> combine
"""
