"""The worker: weights, KV tensors and kernels of one device; nothing that cannot be rebuilt.

Its rooms, top first; imports go down only.

__main__      wiring
service       WorkerService: the lease, the model's lifecycle, the stream of steps
wire          protobuf to plain steps and back; refuses what is malformed
lease         which engine incarnation is served
stepper       the one thread that runs steps, and what surrounds a step on it
simulated     a runner without a model: scripted or random answers, and a cost model for time
script        what a simulated worker answers, and where it fails
toy_text      text files for a simulated worker without a folder
runner        the real runner: states → batch → forward → sample → result
memory        the memory sum
sampling/     from logits to tokens
weights       weights by name, from safetensors or GGUF
gguf_file     reading GGUF
text_files    tokenizer, config and template of a model as files
models/       the mathematics of each architecture
layers        linear layers, norms, embeddings
attention     attention over the paged cache
cache         the KV tensors
states        a fixed row for each request: its ids and blocks
batch         the flat input of one forward pass
metrics       Prometheus
config        settings
step          one step as plain columns, and the Runner protocol
"""
