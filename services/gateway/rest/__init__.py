"""The OpenAI API: one renderer, and three ways to reach it. Rooms from the top down:

__main__    the API in a process of its own, in front of a gateway
asgi        HTTP: routes, limits, errors, clients that leave
http        the HTTP server inside our process
facade      the same over google.api.HttpBody, for a proxy in front
forward     an Api that passes bodies on to a facade
renderer    an Api over this process's front
documents   whole answers and stream chunks as bytes
merge       several streams as one
shapes      pieces of answers: logprobs, usage, finish reasons
reply       what an Api answers, and how errors look
"""
