"""Looks at an LMDB data file before LMDB maps it.

LMDB trusts its file: a truncated one kills the process with SIGBUS, a garbled page can trip an assertion.
So the pages that the newest meta page reaches are checked first: numbers, flags and bounds of the nodes
of every branch and leaf page. The layout is that of LMDB 0.9's data version 1 (little-endian, 64 bits).
Nothing is written.

Cost: one pass over the file's pages, vectorised by level. The caller makes sure that nobody writes
meanwhile.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

import numpy as np

from tierkv.types import Int64Array, UInt8Array

_META = struct.Struct("<II8xQ")
_DB = struct.Struct("<IHHQQQQQ")
_TAIL = struct.Struct("<QQ")
_MAGIC = 0xBEEFC0DE
_VERSION = 1
_HEADER_BYTES = 16
_NODE_BYTES = 8
_NO_PAGE = (1 << 64) - 1
_BRANCH, _LEAF, _OVERFLOW, _META_FLAG = 1, 2, 4, 8
_BIG_DATA, _SUB_DATA = 1, 2
_MAX_DEPTH = 32


class LmdbFileError(Exception):
    """What is wrong with the file, in words."""


@dataclass(frozen=True, slots=True)
class _Tree:
    root: int
    sub_trees: bool


def check_lmdb_file(path: str | os.PathLike[str]) -> None:
    """Raises LmdbFileError when LMDB must not open the file. An empty or missing file is fine."""
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return
    if size == 0:
        return
    with open(path, "rb") as file:
        head = file.read(2 * 65536)
    page_bytes, last_page, trees = _newest_meta(head)
    whole_pages = size // page_bytes
    if whole_pages < 2:
        raise LmdbFileError(f"it is truncated: {size} bytes are left of {(last_page + 1) * page_bytes}")
    pages = np.memmap(path, np.uint8, "r", shape=(whole_pages, page_bytes))
    try:
        _Walk(pages, size, last_page).run(trees)
    finally:
        del pages


def _newest_meta(head: bytes) -> tuple[int, int, list[_Tree]]:
    """(bytes a page, last page, the two trees) of the valid meta page with the highest transaction number."""
    found: list[tuple[int, int, int, list[_Tree]]] = []
    first = _read_meta(head, 0)
    page_bytes = first[1] if first else 4096
    second = _read_meta(head, page_bytes)
    for meta in (first, second):
        if meta is not None:
            found.append(meta)
    if len(found) < 2:
        raise LmdbFileError(
            "it has no valid header (not an LMDB file of data version 1, or its start is damaged)"
        )
    _, size, last_page, trees = max(found, key=lambda meta: meta[0])
    return size, last_page, trees


def _read_meta(head: bytes, start: int) -> tuple[int, int, int, list[_Tree]] | None:
    if len(head) < start + 152 or not struct.unpack_from("<H", head, start + 10)[0] & _META_FLAG:
        return None
    magic, version, _ = _META.unpack_from(head, start + 16)
    if magic != _MAGIC or version != _VERSION:
        return None
    free = _DB.unpack_from(head, start + 40)
    main = _DB.unpack_from(head, start + 88)
    last_page, transaction = _TAIL.unpack_from(head, start + 136)
    page_bytes = free[0]
    if page_bytes < 512 or page_bytes > 65536 or page_bytes & (page_bytes - 1):
        return None
    return transaction, page_bytes, last_page, [_Tree(free[7], False), _Tree(main[7], True)]


class _Walk:
    """One check: follows all trees level by level."""

    def __init__(self, pages: UInt8Array, size_bytes: int, last_page: int) -> None:
        self._pages = pages
        self._count, self._page_bytes = pages.shape
        self._size_bytes = size_bytes
        self._last_page = last_page
        self._seen = np.zeros(self._count, np.bool_)

    def run(self, trees: list[_Tree]) -> None:
        open_trees = list(trees)
        while open_trees:
            tree = open_trees.pop()
            if tree.root == _NO_PAGE:
                continue
            level: Int64Array = np.array([min(tree.root, (1 << 62))], np.int64)
            for _ in range(_MAX_DEPTH):
                branches, sub_trees = self._check_level(level, tree.sub_trees)
                open_trees += sub_trees
                if not len(branches):
                    break
                level = branches
            else:
                raise LmdbFileError(f"a tree is deeper than {_MAX_DEPTH} levels")

    def _check_level(self, level: Int64Array, sub_trees: bool) -> tuple[Int64Array, list[_Tree]]:
        """Checks the pages of one level; returns their children and the roots of trees named in them."""
        self._visit(level)
        heads = np.ascontiguousarray(self._pages[level, :_HEADER_BYTES])
        numbers = heads[:, :8].copy().view("<u8")[:, 0]
        words = heads[:, 8:].copy().view("<u2")
        flags, lower, upper = words[:, 1] & 0x2F, words[:, 2].astype(np.int64), words[:, 3].astype(np.int64)
        wrong = (numbers != level) | ((flags != _BRANCH) & (flags != _LEAF)) | (flags != flags[0])
        wrong |= (lower <= _HEADER_BYTES) | (lower % 2 == 1) | (lower > upper) | (upper > self._page_bytes)
        self._refuse(level, wrong, "is not the page it should be")
        keys = (lower - _HEADER_BYTES) // 2
        most = int(keys.max())
        valid = np.arange(most) < keys[:, None]
        area = np.ascontiguousarray(self._pages[level, _HEADER_BYTES : _HEADER_BYTES + 2 * most])
        starts = np.where(valid, area.view("<u2").astype(np.int64), upper[:, None])
        outside = valid & (
            (starts < upper[:, None]) | (starts > self._page_bytes - _NODE_BYTES) | (starts % 2 == 1)
        )
        self._refuse(level, outside.any(axis=1), "names nodes outside of itself")
        owners = np.repeat(level, keys)
        places = starts[valid]
        nodes = (
            self._pages[owners[:, None], places[:, None] + np.arange(_NODE_BYTES)]
            .view("<u2")
            .astype(np.int64)
        )
        low, high, node_flags, key_bytes = nodes.T
        if flags[0] == _BRANCH:
            children = low | high << 16 | node_flags << 32
            self._refuse(
                owners, places + _NODE_BYTES + key_bytes > self._page_bytes, "has a key that leaves it"
            )
            return children, []
        data_bytes = low | high << 16
        big = (node_flags & _BIG_DATA) != 0
        stored = np.where(big, 8, data_bytes)
        self._refuse(
            owners, places + _NODE_BYTES + key_bytes + stored > self._page_bytes, "has a value that leaves it"
        )
        for row in np.flatnonzero(big).tolist():
            self._check_overflow(
                int(owners[row]), int(places[row] + _NODE_BYTES + key_bytes[row]), int(data_bytes[row])
            )
        found = []
        if sub_trees:
            for row in np.flatnonzero((node_flags & _SUB_DATA) != 0).tolist():
                start = int(places[row] + _NODE_BYTES + key_bytes[row])
                if data_bytes[row] != _DB.size:
                    raise LmdbFileError(
                        f"page {owners[row]} holds a table of {data_bytes[row]} bytes, not {_DB.size}"
                    )
                found.append(_Tree(_DB.unpack_from(self._pages[owners[row]].tobytes(), start)[7], False))
        return np.empty(0, np.int64), found

    def _check_overflow(self, owner: int, start: int, data_bytes: int) -> None:
        page = int.from_bytes(self._pages[owner, start : start + 8].tobytes(), "little")
        needed = -(-(data_bytes + _HEADER_BYTES) // self._page_bytes)
        if page + needed > self._count:
            raise LmdbFileError(self._truncated(page + needed - 1))
        self._visit(np.arange(page, page + needed))
        head = self._pages[page, :_HEADER_BYTES].tobytes()
        number, _, flags, length = struct.unpack("<QHHI", head)
        if number != page or not flags & _OVERFLOW or length < needed:
            raise LmdbFileError(f"page {page} is not the overflow page it should be")

    def _visit(self, level: Int64Array) -> None:
        low, high = int(level.min()), int(level.max())
        if low < 2 or high > self._last_page:
            raise LmdbFileError(
                f"page {low if low < 2 else high} is named, but pages go from 2 to {self._last_page}"
            )
        if high >= self._count:
            raise LmdbFileError(self._truncated(high))
        if self._seen[level].any() or len(np.unique(level)) < len(level):
            raise LmdbFileError("a page is named twice")
        self._seen[level] = True

    def _truncated(self, page: int) -> str:
        return (
            f"it is truncated: page {page} is needed, but {self._size_bytes} bytes end at page {self._count}"
        )

    @staticmethod
    def _refuse(pages: Int64Array, wrong: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], what: str) -> None:
        if wrong.any():
            raise LmdbFileError(f"page {pages[int(np.argmax(wrong))]} {what}")
