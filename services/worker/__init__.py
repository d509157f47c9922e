"""The worker: weights, KV tensors and kernels of one device; nothing that cannot be rebuilt.

Its rooms, top first; imports go down only.

__main__      wiring
service       WorkerService: the lease, the model's lifecycle, the stream of steps
wire/         protobuf to plain steps and back; refuses what is malformed
lease         which engine incarnation is served
lifecycle     model and cache: loaded, put to sleep, woken
masks         grammar masks on their way to the step that waits for them
stepper       what surrounds a step: failures, faulty rows, progress, the log
threads       the one thread that runs steps, and the one that waits for them
simulated     a runner without a model: scripted or random answers, and a cost model for time
simulated_rows  its rows, and whether a step may compute them
simulated_text  its text files
script        what a simulated worker answers, and where it fails
toy_text      text files for a simulated worker without a folder
runner        the real runner: a model, its memory, its steps
first_steps   steps before serving, that compile what has to be
trial         the largest step, run for the memory that it takes
device_steps  steps on a device, two in flight: the same without waiting for it in between
device_sampling  what a step samples: parameters up, words down
device_states  a fixed row for each request on the device, and what the host knows of it
device_link   one copy up and one down
host_steps    steps on a CPU: states → batch → forward → sample → result
graphs        what is recorded before serving, and the memory that it takes
multimodal    encoder outputs, and what a batch reads of them
readings      what is read off hidden states besides samples
prompt_logprobs  log probabilities of a prompt's tokens
pooling       hidden states of a prompt to one vector
speculative   drafts: the positions to sample, and the tokens that count
sampling/     from logits to tokens
loading       a model path into a ready model
devices       the device: whether it is there, and its memory
memory        the memory sum
compiled      a pass as compiled pieces
text_files    tokenizer, config and template of a model as files
vision_weights  which of a checkpoint's weights are an encoder's, by name
weights       weights by name, from safetensors or GGUF
upload        tensors to a GPU, through pinned memory
gguf_file     a GGUF file in Hugging Face terms
gguf_blocks   its quantized tensors, as products read them
gguf_reader   its layout: metadata and tensors, mapped
models/       the mathematics of each architecture
layers        the weights of a decoder, ready to be used
cache         the KV tensors
states        a fixed row for each request: its ids and blocks
batch         the flat input of one forward pass
blobs         media as gateways prepared them, from the host's folder or fetched
metrics       Prometheus
config        settings
step          one step as plain columns, and the Runner protocol
"""
