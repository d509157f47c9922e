"""Protobuf on one side, plain data on the other. What is malformed is refused here, by field.

submits  from a gateway: a Submit into a RequestSpec
frames   to a gateway: what a session has to tell, the load, failures
steps    to the worker and back: a StepPlan, masks, a StepOutcome
cards    who is who: peers, the model, its text files
columns  little-endian bytes into arrays and back
"""
