"""/v1/responses without a store: each request brings its whole history. Rooms from the top down:

answer      the response around its items, whole and as events
output      deltas to items: reasoning, a message, calls of functions
items       items of a history to the turns of a conversation
"""
