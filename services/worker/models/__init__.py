"""Models as mathematics on a flat batch; its rooms top first.

registry    which architecture is served by what
llama, mistral, qwen2, qwen3, qwen3_vl    one architecture each: how its config.json is read
decoder     the Llama family's forward pass
vision      the encoder of images and videos
mrope       positions with three axes
rotary      frequencies of the rotary embedding
config      what a decoder is, and the keys of a config.json
"""
