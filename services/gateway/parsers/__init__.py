"""Answers read as they come: reasoning, then text and calls of tools. Rooms from the top down:

formats     all formats by name, and what a chat template tells of them
hermes      calls between tags (Hermes, Qwen)
llama3      bare JSON objects (Llama 3)
mistral     after a marker: an array, or name by name (Mistral)
shape       what a format is
"""
