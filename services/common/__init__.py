"""What two services need and what names no noun of the domain.

settings    one definition per knob: command line, environment, file and help come from it
server      a gRPC server with our options, interceptor, health, reflection and orderly end
channel     a gRPC channel with our options, and waiting with back-off
probe       asks a process whether it is ready, for health checks
status      errors as google.rpc.Status, and back
errors      the exception tree and its one mapping to gRPC and HTTP
logs        one JSON line per event
metrics     Prometheus buckets and the scrape endpoint
tracing     W3C trace context, carried from role to role
"""
