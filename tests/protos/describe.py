"""The contracts as text: names, numbers and types, and nothing that may change freely.

`make contracts` writes it to contracts.txt; a test compares. A change that breaks somebody then
shows as a line removed in a review.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor, ServiceDescriptor

from protos import common_pb2, engine_pb2, gateway_pb2, openai_rest_pb2, worker_pb2

FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (common_pb2, gateway_pb2, engine_pb2, worker_pb2, openai_rest_pb2)
)
_TYPES = {getattr(FieldDescriptor, name): name[5:].lower() for name in dir(FieldDescriptor) if name.startswith("TYPE_")}


def describe() -> str:
    """All files, in the order of FILES."""
    return "\n".join(line for file in FILES for line in _file(file)) + "\n"


def _file(file: FileDescriptor) -> Iterator[str]:
    yield f"file {file.name} package {file.package}"
    for service in file.services_by_name.values():
        yield from _service(service)
    for message in file.message_types_by_name.values():
        yield from _message(message)
    for enum in file.enum_types_by_name.values():
        yield from _enum(enum)


def _service(service: ServiceDescriptor) -> Iterator[str]:
    yield f"service {service.name}"
    for method in service.methods:
        takes = "stream " * method.client_streaming + method.input_type.full_name
        gives = "stream " * method.server_streaming + method.output_type.full_name
        yield f"  {method.name}({takes}) returns {gives}"


def _message(message: Descriptor) -> Iterator[str]:
    yield f"message {message.full_name}"
    for field in message.fields:
        yield f"  {field.number} {field.name} {_kind(field)}"
    for inner in message.nested_types:
        yield from _message(inner)
    for enum in message.enum_types:
        yield from _enum(enum)


def _enum(enum: EnumDescriptor) -> Iterator[str]:
    yield f"enum {enum.full_name}"
    for value in enum.values:
        yield f"  {value.number} {value.name}"


def _kind(field: FieldDescriptor) -> str:
    kind = _TYPES[field.type]
    if field.message_type or field.enum_type:
        kind = (field.message_type or field.enum_type).full_name
    oneof = field.containing_oneof
    if field.is_repeated:
        return f"repeated {kind}"
    if oneof and not oneof.name.startswith("_"):
        return f"oneof {oneof.name} {kind}"
    return f"optional {kind}" if oneof else kind


if __name__ == "__main__":
    print(describe(), end="")
