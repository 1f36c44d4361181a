"""Reads TensorBoard's event files as TensorBoard does: every CRC is checked, and repeated steps are dropped."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a TFRecord file, checked with the checksums of tensorboardX.


    A last record that was cut off ends the file, as it does for TensorBoard.
    """
    from tensorboardX.record_writer import masked_crc32c

    at = 0
    while at + 12 <= len(data):
        length, of_length = struct.unpack_from("<QI", data, at)
        assert of_length == masked_crc32c(data[at : at + 8]), f"the length at {at} is damaged"
        if at + 16 + length > len(data):
            return
        content = data[at + 12 : at + 12 + length]
        (of_content,) = struct.unpack_from("<I", data, at + 12 + length)
        assert of_content == masked_crc32c(content), f"the record at {at} is damaged"
        yield content
        at += 16 + length


def events(path: Path) -> list[Any]:
    """Return the events of one file."""
    from tensorboardX.proto.event_pb2 import Event

    return [Event.FromString(content) for content in records(path.read_bytes())]


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, value, wall time) of each tag, over all files of a directory in name order."""
    from tensorboardX.proto.event_pb2 import SessionLog

    results: dict[str, list[tuple[int, float, float]]] = {}
    for path in sorted(folder.glob("*tfevents*")):
        version = ""
        for event in events(path):
            version = event.file_version or version
            assert version == "brain.Event:2", "without it, TensorBoard does not look at session logs"
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                results = {tag: [row for row in rows if row[0] < event.step] for tag, rows in results.items()}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    results.setdefault(value.tag, []).append((event.step, value.simple_value, event.wall_time))
    return results


def texts(folder: Path) -> dict[str, str]:
    """Return the last text of each tag."""
    results = {}
    for path in sorted(folder.glob("*tfevents*")):
        for event in events(path):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "text":
                    results[value.tag.removesuffix("/text_summary")] = value.tensor.string_val[0].decode()
    return results
