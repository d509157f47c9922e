"""Every knob of the gateway, and of the REST process that can stand in front of it."""

from __future__ import annotations

from typing import ClassVar, Literal

from services.common.settings import Settings, knob


class GatewaySettings(Settings):
    """The gateway: text and clients. Speaks gRPC and the OpenAI REST API, and drives one engine."""

    section: ClassVar[str] = "gateway"

    name: str = knob("gateway", "stable name of this process in logs and metrics")
    engine: str = knob("127.0.0.1:50052", "address of the engine: host:port or unix:/path")

    host: str = knob("127.0.0.1", "address that clients reach, for HTTP and gRPC")
    http_port: int = knob(8000, "port of the REST API; 0 takes any free one", ge=0, le=65535)
    grpc_port: int = knob(50051, "port of the gRPC API; 0 takes any free one", ge=0, le=65535)
    reuse_port: bool = knob(False, "share both ports with other gateways; the kernel spreads connections over them")

    private_host: str = knob("127.0.0.1", "address of the private port")
    private_port: int | None = knob(
        None, "port for health and metrics of this process alone; 0 takes any free one; by default none", ge=0, le=65535
    )

    tokenizer_threads: int = knob(2, "threads that turn text into ids and render chat templates", ge=1, le=256)
    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral", "mistral_named"] = knob(
        "auto", "how the model writes calls of tools; auto reads it from the chat template, none refuses tools"
    )
    reasoning_parser: Literal[
        "auto", "none", "think", "thinking", "bracket_think", "seed_think", "thought", "reasoning"
    ] = knob(
        "auto", "tags around the model's reasoning; auto reads them from the chat template, none shows all as text"
    )
    allow_chat_template: bool = knob(
        False, "requests may bring a chat template; it is a program, so only for clients that are trusted"
    )

    media_dir: str = knob(
        "", "folder in which media lie for workers of this host; empty is a folder of this user in /dev/shm or /tmp"
    )
    media_store_bytes: int = knob(1 << 30, "media in that folder that no request needs any more, in bytes", ge=1 << 20)
    media_uploads_bytes: int = knob(256 << 20, "uploaded and named media that are kept beside it, in bytes", ge=1 << 20)
    media_processes: int = knob(2, "processes that decode images and videos", ge=1, le=256)
    media_memory_bytes: int = knob(1 << 30, "memory that such a process may take for one item", ge=64 << 20)
    media_timeout_s: float = knob(60.0, "time that such a process may take for one item", gt=0)
    media_nice: int = knob(10, "niceness of these processes beside the gateway", ge=0, le=19)
    media_queue: int = knob(1024, "items that wait for them; more are refused", ge=1)
    media_max_items: int = knob(64, "images and videos of one request", ge=1, le=4096)
    media_max_bytes: int = knob(64 << 20, "longest file of an image or a video", ge=1024)
    media_image_pixels: int = knob(64_000_000, "most pixels of an image", ge=1)
    media_video_pixels: int = knob(16_777_216, "most pixels of a frame of a video", ge=1)
    media_video_frames: int = knob(36_000, "most frames of a video", ge=1)
    media_allowed_hosts: tuple[str, ...] = knob(
        (), "hosts from which media are fetched; .example.org is all below example.org; none fetches nothing"
    )
    media_allow_any_host: bool = knob(False, "media are fetched from any host of the public internet")
    media_ports: tuple[int, ...] = knob((80, 443), "ports at which they are fetched")
    media_redirects: int = knob(5, "redirects that are followed, each checked as the first URL", ge=0, le=20)
    media_fetch_s: float = knob(10.0, "time that fetching one of them may take, redirects included", gt=0)
    media_files: str = knob("", "folder whose files may be named by file: URLs; empty reads none")
    blob_host: str = knob("127.0.0.1", "address at which workers of other hosts fetch media that were prepared here")
    blob_port: int = knob(0, "port for that; 0 takes any free one", ge=0, le=65535)
    blob_announce: str = knob(
        "", "name or address that workers are told; empty is --blob-host, or this host's name where that is 0.0.0.0"
    )

    max_body_bytes: int = knob(8 * 1024 * 1024, "longest request body that is read", ge=1024)
    max_concurrent_requests: int = knob(8192, "gRPC calls at once; more are refused", ge=1)

    replay_budget_s: float = knob(60.0, "how long live requests wait for a lost engine to come back", ge=0)
    ready_silence_s: float = knob(15.0, "not ready once the engine's work has made no progress for this long", gt=0)
    drain_s: float = knob(30.0, "time that live streams get to finish at the first SIGTERM", ge=0)

    log_level: Literal["debug", "info", "warning", "error"] = knob("info", "least urgent events that are logged")
    log_style: Literal["json", "text"] = knob("json", "one JSON object per line, or short lines for a terminal")


class RestSettings(Settings):
    """The REST API in a process of its own: passes bodies through to a gateway over gRPC."""

    section: ClassVar[str] = "rest"

    name: str = knob("rest", "stable name of this process in logs")
    gateway: str = knob("127.0.0.1:50051", "gRPC address of the gateway: host:port or unix:/path")

    host: str = knob("127.0.0.1", "address that clients reach")
    http_port: int = knob(8080, "port of the REST API; 0 takes any free one", ge=0, le=65535)

    max_body_bytes: int = knob(4 * 1024 * 1024, "longest request body that is read", ge=1024, le=7 * 1024 * 1024)
    drain_s: float = knob(30.0, "time that live streams get to finish at the first SIGTERM", ge=0)

    log_level: Literal["debug", "info", "warning", "error"] = knob("info", "least urgent events that are logged")
    log_style: Literal["json", "text"] = knob("json", "one JSON object per line, or short lines for a terminal")
