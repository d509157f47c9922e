"""What an answer must follow: read from a request, checked, and written as a grammar that holds all of it.

    response_format, structured_outputs, constraint, text.format ──reading──▶ Wanted ─┐
    tools and tool_choice ──▶ Calls ──────────────────────────────────────────────────┼─combining─▶ Constraint
    reasoning before the answer ──────────────────────────────────────────────────────┘

building   all of it in a thread, within a time, tried out on the library before the engine sees it
trial      a grammar tried on the library, without the model's vocabulary
combining  one grammar of an answer, calls of tools, and reasoning before them
reading    what a client asked for, with its place in the client's own spelling
lark       Lark text: strings, terminals, JSON within it, and what a client's own grammar may not say
endings    Lark rules that no output ever gets to the end of
schemas    JSON schemas in a normal form that the library holds exactly, or refused with the place
parts      plain data that passes between these
"""
