"""The table of requests on the device: its writes, what a step gathers of it, and the tokens that it takes in."""
