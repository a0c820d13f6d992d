"""Request traces in Mooncake's JSON Lines format, read strictly and written back.

One JSON object a line: timestamp (ms), input_length and output_length (tokens), hash_ids (one id per block of
the input; equal ids mean equal chained prefix blocks). Other fields are ignored. A bad line is an error that
names the file, the line and what is wrong: a trace that is silently repaired gives figures of another
workload.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from tierkv.errors import ArgumentError, FormatError
from tierkv.types import Int64Array

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a workload. hash_ids: (n,) int64, chained: equal ids name equal prefixes."""

    timestamp_ms: float
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens that were generated."""
    hash_ids: Int64Array


class _Line(msgspec.Struct):
    timestamp: _Milliseconds
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Count]


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Request]:
    """Yields the requests of a trace file, at most `limit` of them.

    Raises ArgumentError when the file cannot be read, and FormatError that names the line when one is bad.
    """
    place = Path(path)
    decoder = msgspec.json.Decoder(_Line)
    previous_ms = 0.0
    try:
        with place.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                if limit is not None and number > limit:
                    return
                try:
                    line = decoder.decode(text)
                except msgspec.ValidationError as error:
                    raise FormatError(f"{place}:{number}: {error}") from error
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise FormatError(f"{place}:{number}: not one JSON object: {error}") from error
                if line.timestamp < previous_ms:
                    raise FormatError(
                        f"{place}:{number}: timestamp {line.timestamp:g} is before the one of the line above "
                        f"({previous_ms:g}): sort the trace by time"
                    )
                previous_ms = line.timestamp
                ids = np.array(line.hash_ids, np.int64)
                if len(np.unique(ids)) != len(ids):
                    raise FormatError(
                        f"{place}:{number}: hash_ids has an id twice: chained ids differ within a request"
                    )
                yield Request(line.timestamp, line.input_length, line.output_length, ids)
    except OSError as error:
        raise ArgumentError(f"trace {place}: cannot be read: {error.strerror}") from error


def write_trace(path: str | os.PathLike[str], requests: Iterable[Request]) -> int:
    """Writes requests in the same format and returns how many; ArgumentError when the file cannot be
    written."""
    place = Path(path)
    encoder = msgspec.json.Encoder()
    count = 0
    try:
        with place.open("wb") as lines:
            for request in requests:
                line = _Line(
                    request.timestamp_ms,
                    request.input_length,
                    request.output_length,
                    request.hash_ids.tolist(),
                )
                lines.write(encoder.encode(line) + b"\n")
                count += 1
    except OSError as error:
        raise ArgumentError(f"trace {place}: cannot be written: {error.strerror}") from error
    return count
