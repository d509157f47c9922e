"""Every route of the HTTP server in one table: what is routed, described in /openapi.json, and tested.

An operation of the Api goes to the renderer, with a body whose fields `takes` names; the others are
answered by the process itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.fields import Api


@dataclass(slots=True, frozen=True)
class Row:
    """A route. `{model}` in a path may hold slashes."""

    method: str
    path: str
    operation: str
    summary: str
    takes: Api | None = None


API: tuple[Row, ...] = (
    Row("POST", "/v1/chat/completions", "chat_completions", "Answer a conversation", Api.CHAT),
    Row("POST", "/v1/completions", "completions", "Continue one or more prompts", Api.COMPLETIONS),
    Row("POST", "/v1/responses", "responses", "Answer a history of items", Api.RESPONSES),
    Row("POST", "/v1/embeddings", "embeddings", "Turn inputs into vectors", Api.EMBEDDINGS),
    Row("POST", "/tokenize", "tokenize", "Turn a text or a conversation into token ids", Api.TOKENIZE),
    Row("POST", "/detokenize", "detokenize", "Turn token ids into text", Api.DETOKENIZE),
    Row("GET", "/v1/models", "models", "List the models"),
    Row("GET", "/v1/models/{model}", "model", "Describe a model"),
)

PROCESS: tuple[Row, ...] = (
    Row("GET", "/health/live", "live", "Whether the process answers"),
    Row("GET", "/health/ready", "ready", "Whether requests can run now"),
    Row("GET", "/health", "health", "The same as /health/ready"),
    Row("GET", "/version", "version", "The release of this server"),
    Row("GET", "/metrics", "metrics", "Prometheus metrics of this process"),
)

DESCRIPTION = Row("GET", "/openapi.json", "description", "This description")

ROUTES = (*API, *PROCESS, DESCRIPTION)
