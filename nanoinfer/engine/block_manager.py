"""`BlockManager`: which sequence owns which block of the KV pool, and which blocks can be reused for equal prefixes.

Called by the scheduler only. Blocks are numbers; the memory behind them belongs to the ranks. Every operation is O(1)
per block. A block is in one of three states:

    in use       ref_count > 0; in the tables of `ref_count` sequences (more than one only through a prefix hit)
    free, cached ref_count = 0, still holds the content that the prefix index names; reused last, oldest first
    free, blank  ref_count = 0, content of no value; reused first

The prefix index maps a chained hash of all tokens up to a block's end to that block (the scheme of vLLM's automatic
prefix caching). A hit is confirmed by comparing the tokens of the whole prefix, so that a collision costs a recompute
and never a wrong answer.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

import xxhash

# Per process, so that nobody outside can prepare prompts whose hashes collide (CVE-2025-25183).
_HASH_SEED = int.from_bytes(os.urandom(8), "little")


def hash_block(parent: bytes, tokens: bytes, cache_key: bytes) -> bytes:
    """128-bit digest of a block's tokens and of everything before them. `parent` is b"" for the first block."""
    digest = xxhash.xxh3_128(seed=_HASH_SEED)
    # Lengths first: no two different triples may feed the same bytes.
    digest.update(len(parent).to_bytes(2, "little") + parent)
    digest.update(len(cache_key).to_bytes(4, "little") + cache_key)
    digest.update(tokens)
    return digest.digest()


@dataclass(eq=False)
class PrefixNode:
    """The tokens of one full block and, through `parent`, of the whole prefix that ends with it."""

    digest: bytes
    tokens: bytes
    cache_key: bytes
    parent: PrefixNode | None

    def is_same_prefix(self, other: PrefixNode) -> bool:
        """Compares the tokens of the whole prefix; usually the chains meet at once, since hits share their nodes."""
        mine: PrefixNode | None = self
        theirs: PrefixNode | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine.tokens != theirs.tokens or mine.cache_key != theirs.cache_key:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


@dataclass
class CachedPrefix:
    """A sequence's full blocks as nodes, in order. Hashed once: preemption and waiting do not hash again."""

    nodes: list[PrefixNode] = field(default_factory=list)

    def adopt(self, i: int, node: PrefixNode) -> None:
        """Replaces node i by an equal one and joins the chains, so that comparing them next time is a pointer test."""
        self.nodes[i] = node
        if i > 0:
            node.parent = self.nodes[i - 1]
        if i + 1 < len(self.nodes):
            self.nodes[i + 1].parent = node


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens.

    hit_tokens / query_tokens: prefix tokens found and asked for since the start, for hit rates.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        # In the order of reuse: blank blocks at the front, then cached ones from the longest unused to the latest.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._index: dict[bytes, int] = {}
        # The node under which a block is indexed; None for blocks that are not.
        self._nodes: list[PrefixNode | None] = [None] * num_blocks
        self.hit_tokens = 0
        self.query_tokens = 0

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, token_ids: list[int], prefix: CachedPrefix, cache_key: bytes) -> list[int]:
        """Blocks that hold the longest cached prefix of `token_ids`, in order. Takes no reference.

        The last token is never part of a hit: it has to be computed to get its logits. `prefix` receives the nodes of
        the hit.
        """
        if not self.enable_prefix_caching:
            return []
        block_ids: list[int] = []
        for i in range((len(token_ids) - 1) // self.block_size):
            node = self._node(token_ids, prefix, i, cache_key)
            block_id = self._index.get(node.digest)
            if block_id is None:
                break
            found = self._nodes[block_id]
            assert found is not None
            if not found.is_same_prefix(node):
                break
            prefix.adopt(i, found)
            block_ids.append(block_id)
        return block_ids

    def can_allocate(self, num_new_blocks: int, cached_block_ids: list[int] | None = None) -> bool:
        """Whether `num_new_blocks` are free besides the cached blocks of a hit, which leave the free list as well."""
        taken = sum(self.ref_counts[block_id] == 0 for block_id in cached_block_ids or ())
        return num_new_blocks + taken <= len(self._free)

    def acquire(self, cached_block_ids: list[int]) -> None:
        """Takes a reference on each block of a prefix hit."""
        for block_id in cached_block_ids:
            if self.ref_counts[block_id] == 0:
                del self._free[block_id]
            self.ref_counts[block_id] += 1

    def allocate(self, num_new_blocks: int) -> list[int]:
        """Takes blocks whose content is lost. The caller has asked `can_allocate`."""
        block_ids = []
        for _ in range(num_new_blocks):
            block_id, _ = self._free.popitem(last=False)
            self._evict(block_id)
            self.ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: list[int]) -> None:
        """Gives back a sequence's table. The tail of a chain is reused before its head, which more prompts share."""
        for block_id in reversed(block_ids):
            self.ref_counts[block_id] -= 1
            assert self.ref_counts[block_id] >= 0
            if self.ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._nodes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def register(self, token_ids: list[int], prefix: CachedPrefix, cache_key: bytes, block_table: list[int],
                 start: int, stop: int) -> None:  # fmt: skip
        """Enters blocks `start` to `stop - 1` of a table, now full and written, into the prefix index.

        Where equal content is indexed already, that block stays the one to hit. Where another prefix has the same
        digest, the first stays.
        """
        if not self.enable_prefix_caching:
            return
        for i in range(start, stop):
            node = self._node(token_ids, prefix, i, cache_key)
            holder = self._index.get(node.digest)
            if holder is None:
                if self._nodes[block_table[i]] is None:
                    self._index[node.digest] = block_table[i]
                    self._nodes[block_table[i]] = node
                continue
            found = self._nodes[holder]
            if found is not None and found.is_same_prefix(node):
                prefix.adopt(i, found)

    def count_query(self, num_tokens: int, num_hit_tokens: int) -> None:
        self.query_tokens += num_tokens
        self.hit_tokens += num_hit_tokens

    def _node(self, token_ids: list[int], prefix: CachedPrefix, i: int, cache_key: bytes) -> PrefixNode:
        """Block i of the sequence as a node of its chain, hashed on first use."""
        nodes = prefix.nodes
        while len(nodes) <= i:
            start = len(nodes) * self.block_size
            tokens = array("q", token_ids[start : start + self.block_size]).tobytes()
            parent = nodes[-1] if nodes else None
            digest = hash_block(parent.digest if parent else b"", tokens, cache_key)
            nodes.append(PrefixNode(digest, tokens, cache_key, parent))
        return nodes[i]

    def _evict(self, block_id: int) -> None:
        node = self._nodes[block_id]
        if node is not None:
            del self._index[node.digest]
            self._nodes[block_id] = None

    def check(self, block_tables: list[list[int]]) -> None:
        """Raises AssertionError unless the pool's books agree with the tables of all live sequences."""
        expected = [0] * self.num_blocks
        for table in block_tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block_id in table:
                expected[block_id] += 1
        assert self.ref_counts == expected, "reference counts differ from the tables"
        free = {block_id for block_id, count in enumerate(self.ref_counts) if count == 0}
        assert set(self._free) == free, "the free list is not the set of unreferenced blocks"
        for digest, block_id in self._index.items():
            node = self._nodes[block_id]
            assert node is not None and node.digest == digest, f"block {block_id} is indexed under a foreign hash"
        indexed = sum(node is not None for node in self._nodes)
        assert indexed == len(self._index), "a block has content that the index does not name"
        for table in block_tables:
            shared = [block_id for block_id in table if self.ref_counts[block_id] > 1]
            assert all(self._nodes[block_id] is not None for block_id in shared), "an unindexed block is shared"
