"""From logits to tokens: a pure function of (logits, parameters, seed, position).

Order of operations: grammar mask, allowed and banned ids, min-tokens, logit bias, penalties,
temperature, min-p, top-k, top-p, Gumbel-max. Where a grammar allows nothing but an end, min-tokens
forbids none. Log probabilities come from the logits before all of it.

sampler      the order, and which positions need which part of it
draw         temperature to Gumbel-max, for many positions at once
masks        what forbids: grammar masks, allowed ids, banned sequences, min-tokens
bias         the feature that adds: logit bias
penalties    the feature that discourages: repetition, frequency, presence
feature      what a feature is, and a position to be sampled
device       the same edits on a device, for rows whose ids lie there
pool         its memory
logprobs     log probabilities and ranks
order        the likeliest tokens in one strict order
noise        Gumbel noise of a candidate
counter      the integer hash behind all randomness; needs no torch
"""
