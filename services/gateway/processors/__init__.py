"""What a model makes of media: read from its files. Knows no pixel.

read   the rules, from config.json and the processor's files
rules  placeholders, the text that takes their place, and what may be asked
"""
