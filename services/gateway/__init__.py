"""The gateway: text and clients. Knows no KV block and no tensor. Rooms from the top down:

__main__    the process: everything made, wired, drained and ended
rest        the OpenAI API over HTTP and HttpBody
service     the gRPC API
embeddings  vectors of many inputs, each a request of its own
front       what both share: a request is run, counted, logged, or refused
models      what is served: the engine's word for it, and its text side
router      the stream to the engine; replay when it was lost
inflight    one request between router and reader
wire        protobuf to plain data and back
text        a model's text side in one piece: bodies in, jobs out
prompts     conversations and texts to ids, cut where a client allows it
attachments  media of conversations: from parts to items that lie in a prompt
answers     what an answer may hold, by the model's template
generation  a whole request: events in, deltas out
pipeline    one choice: tokens to text, stops, deltas
stops       stop strings
detokenize  ids to text, one at a time
constraints  what an answer must follow, as grammars that hold all of it
toolless    tools for templates that have no place for them
chat        conversations to a prompt, by the model's template
messages    the turns of a conversation
tools       tools that a client offers, and which one must be called
processors  what a model makes of media: sizes, frames, the text around them
media       images and videos: decoded in processes of their own, kept as blobs
parts       what a turn is made of: text, images, videos
tokenize    text to ids, in threads
text_files  the model's files, read
validate    checks that need the model or another field
fields      the table of request fields
asked       what a client asked for, as plain values
kinds       what a single field may be
json_text   JSON as clients write it, nothing in it lost
limits      how much is taken from one request
metrics     what is counted
parsers     answers as they come: reasoning, text, calls of tools
vocabulary  what each id stands for
request     a request and its answers as plain data
trace       the id and the trace that follow a request
config      every knob
"""
