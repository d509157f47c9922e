"""From logits to tokens: a pure function of (logits, parameters, seed, position).

sampler      the order of operations, and which rows need which of them
logprobs     log probabilities and ranks from the raw logits
cutoffs      min-p, top-k and top-p: which candidates survive
features     what edits single logits: allowed and banned ids, min-tokens, bias, penalties
noise        Gumbel noise per candidate from the counter
counter      the integer hash behind all randomness; needs no torch
"""
