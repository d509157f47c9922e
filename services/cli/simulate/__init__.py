"""`triptych simulate`: the engine's own scheduler under a virtual clock, with a cost model in the worker's place.

    workload ──▶ arrivals ──▶ clock ◀──▶ EngineCore
                                │  ◀──▶ worker (costs time, computes nothing)
                                ▼
              summary, document, table, trace, plot

command    the options, and who watches the run
document   --json: the steps one by one, then the summary
table      what a person reads in a terminal
trace      --trace: Chrome's trace format, for Perfetto
plot       --plot: the composition of the batches over the steps
canvas     a picture of lines, areas and text, as SVG or PNG
clock      the run itself: time goes from event to event
summary    what became of the requests and of the steps
observer   what all of the above may watch
worker     how long a step takes, and its outcome
arrivals   the requests of a workload in the order in which they come
spread     quantiles of any number of values in bounded memory
workload   the file: every field, checked
amount     a number of the file that is fixed, or drawn for each request
"""
