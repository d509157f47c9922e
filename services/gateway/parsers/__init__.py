"""Answers read as they come: reasoning, then text and calls of tools. Rooms from the top down:

answer      a whole answer: text in, events out
reasoning   what comes before it, between tags
formats     all formats of calls by name, and what a chat template tells of them
hermes      calls between tags (Hermes, Qwen)
llama3      bare JSON objects (Llama 3)
mistral     after a marker: an array, or name by name (Mistral)
shape       what a format is
calls       a call, read from its JSON object
reader      text that comes in pieces, for grammars written as if it were whole
"""
