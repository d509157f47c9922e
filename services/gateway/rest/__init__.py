"""The OpenAI API: one renderer, and three ways to reach it. Rooms from the top down:

__main__    the API in a process of its own, in front of a gateway
asgi        HTTP: routes, limits, errors, clients that leave
openapi     the description of it all, from the tables of routes and fields
answers     schemas of what is answered
bodies      schemas of the fields that the table leaves open
response_answers       those of /v1/responses
schemas     words to write schemas with, and those of the kinds of fields
routes      the table of routes
http        the HTTP server inside our process
facade      the same over google.api.HttpBody, for a proxy in front
forward     an Api that passes bodies on to a facade
renderer    an Api over this process's front
embeddings  /v1/embeddings: vectors as numbers or as base64
responses   /v1/responses: its items in and out
chat_documents         whole chats and their chunks, as bytes
completion_documents   the same of completions
documents              what these two have in common
merge       several streams as one
shapes      pieces of answers: logprobs, usage, finish reasons
reply       what an Api answers, and how errors look
"""
