"""The engine: owns every request's state and the schedule. It sees token ids, never text or pixels,
and imports neither torch nor numpy. Its rooms, top first; imports go strictly down:

__main__         the process: wiring, readiness, the orderly end
service/         EngineService over gRPC: a stream per gateway, the operator's calls, the watches
control          pause, sleep, drain, and back
loop             take in, schedule, execute, apply, emit
workers          the worker group: made to stand, driven, lost, made to stand again
wire/            protobuf to plain data and back
beats            when heartbeats come
sessions         what each gateway has been told, and what it has yet to be told
journal          what the log says of requests
cache_watch      who watches the prefix index
records          what came of each accepted request
metrics          Prometheus series under the names that dashboards know
core             the pure core: submit, abort, schedule, apply
explain          where a request is and why
blame            whom to suspect when a worker died over a step
registry         who is known, by gateway, handle and token
scheduler        what runs in the next step
cache_events     what becomes of the prefix index, numbered, for those who watch
kv/              KV blocks: the pool, the prefix index, what a request holds
encoder_cache    the resource of media: encoder time, and room for what it makes
drafts           the resource of speculative decoding: what a request's own tokens propose
grammar          the resource of constraints: who waits for a grammar, and what a row may say next
prompt_logprobs  the resource of requests that ask for log probabilities of their prompt
pooling          the resource of requests that ask for a vector instead of tokens
intake           the checks before anything of a request is kept
flight           the steps on their way to the workers and back
outcome          what a worker answered, cut per request
deadlines        who gives up when
rows             which request is on which row
waiting          the line of those who wait
policies         the order of that line
resources        what limits who runs: one protocol for every feature
report           what the core says about itself
plan             one step, on its way to the workers and back
limits           the numbers that the core is made with
request          what was asked, and where it stands
ngrams           where a sequence of tokens has been before
matching         what the core knows of grammars
events           what the core tells the gateways
grammars         llguidance at work: grammars compiled in threads
standing         what the worker group holds once it stands
config           every knob, each with its one definition
"""
