"""The pool's laws: conservation, who may share what, what is evicted first; a hash collision is only a miss."""

from __future__ import annotations

import random

import pytest

from nanoinfer.engine import block_manager
from nanoinfer.engine.block_manager import BlockManager, CachedPrefix, hash_block

B = 4


class Owner:
    """A sequence as far as the block manager is concerned: admitted with a hit, written block by block, released."""

    def __init__(self, manager: BlockManager, token_ids: list[int], cache_key: bytes = b"") -> None:
        self.manager, self.token_ids, self.cache_key = manager, list(token_ids), cache_key
        self.prefix = CachedPrefix()
        self.table: list[int] = []
        self.num_hit = 0

    def admit(self) -> Owner:
        manager = self.manager
        cached = manager.match_prefix(self.token_ids, self.prefix, self.cache_key)
        num_new = manager.num_blocks_for(len(self.token_ids)) - len(cached)
        assert manager.can_allocate(num_new, cached)
        manager.acquire(cached)
        self.table = cached + manager.allocate(num_new)
        self.num_hit = len(cached)
        return self

    def write(self) -> Owner:
        """All of its tokens are computed now."""
        self.manager.register(
            self.token_ids, self.prefix, self.cache_key, self.table, self.num_hit, len(self.token_ids) // B
        )
        return self

    def release(self) -> Owner:
        self.manager.release(self.table)
        self.table = []
        return self


def use(manager: BlockManager, token_ids: list[int], cache_key: bytes = b"") -> Owner:
    """Admits, writes and releases."""
    return Owner(manager, token_ids, cache_key).admit().write().release()


def num_hits(manager: BlockManager, token_ids: list[int], cache_key: bytes = b"") -> int:
    return len(manager.match_prefix(list(token_ids), CachedPrefix(), cache_key))


def tokens(*names: int) -> list[int]:
    """One block per name, all of its tokens its own."""
    return [name * 100 + i for name in names for i in range(B)]


def test_a_fresh_pool_hands_out_every_block_once() -> None:
    manager = BlockManager(7, B)
    assert manager.num_free_blocks == 7
    blocks = manager.allocate(7)
    assert sorted(blocks) == list(range(7)) and not manager.can_allocate(1) and manager.can_allocate(0)
    manager.check([blocks])
    manager.release(blocks)
    manager.check([])
    assert manager.num_free_blocks == 7


@pytest.mark.parametrize("length", range(1, 4 * B + 2))
def test_a_second_prompt_of_n_tokens_hits_all_full_blocks_but_the_last_token_s(length: int) -> None:
    manager = BlockManager(20, B)
    use(manager, list(range(length)))
    assert num_hits(manager, list(range(length))) == (length - 1) // B
    assert num_hits(manager, [*range(length), 999]) == length // B


def test_only_what_follows_the_same_prefix_is_a_hit() -> None:
    manager = BlockManager(40, B)
    use(manager, tokens(1, 2, 3))
    assert num_hits(manager, tokens(1, 2, 3, 4)) == 3
    assert num_hits(manager, tokens(1, 2, 4, 3)) == 2
    assert num_hits(manager, tokens(1, 3, 2)) == 1
    assert num_hits(manager, tokens(2, 3, 4)) == 0
    assert num_hits(manager, tokens(2, 1, 2, 3)) == 0
    off_by_one = tokens(1, 2, 3)
    off_by_one[B] += 1
    assert num_hits(manager, off_by_one) == 1


def test_cache_keys_keep_equal_prompts_apart() -> None:
    manager = BlockManager(40, B)
    use(manager, tokens(1, 2, 3), b"tenant a")
    assert num_hits(manager, tokens(1, 2, 3, 4), b"tenant a") == 3
    assert num_hits(manager, tokens(1, 2, 3, 4), b"tenant b") == 0
    assert num_hits(manager, tokens(1, 2, 3, 4)) == 0
    use(manager, tokens(1, 2, 3), b"tenant b")
    manager.check([])
    assert num_hits(manager, tokens(1, 2, 3, 4), b"tenant b") == 3


def test_disabled_prefix_caching_never_hits() -> None:
    manager = BlockManager(20, B, enable_prefix_caching=False)
    use(manager, tokens(1, 2))
    assert num_hits(manager, tokens(1, 2, 3)) == 0
    manager.check([])


def test_blocks_are_not_a_hit_before_they_are_written() -> None:
    manager = BlockManager(20, B)
    owner = Owner(manager, tokens(1, 2, 3)).admit()
    assert num_hits(manager, tokens(1, 2, 3, 4)) == 0
    manager.register(owner.token_ids, owner.prefix, b"", owner.table, 0, 2)
    assert num_hits(manager, tokens(1, 2, 3, 4)) == 2
    manager.check([owner.table])


def test_a_hit_on_a_block_in_use_shares_it() -> None:
    manager = BlockManager(8, B)
    first = Owner(manager, tokens(1, 2, 3)).admit().write()
    second = Owner(manager, tokens(1, 2, 9)).admit()
    assert second.table[:2] == first.table[:2] and second.table[2] not in first.table
    assert [manager.ref_counts[b] for b in first.table] == [2, 2, 1]
    assert manager.num_free_blocks == 8 - 4
    manager.check([first.table, second.table])
    first.release()
    manager.check([second.table])
    assert manager.num_free_blocks == 8 - 3
    second.release()
    manager.check([])
    assert manager.num_free_blocks == 8


def test_a_hit_on_a_free_block_takes_it_from_the_free_list_once() -> None:
    manager = BlockManager(4, B)
    use(manager, tokens(1, 2, 3))
    # 4 free, 2 of them the hit: room for 2 new ones, not 4.
    cached = manager.match_prefix(tokens(1, 2, 8, 9), CachedPrefix(), b"")
    assert len(cached) == 2
    assert manager.can_allocate(2, cached) and not manager.can_allocate(3, cached)
    manager.acquire(cached)
    assert manager.num_free_blocks == 2
    table = cached + manager.allocate(2)
    assert sorted(table) == [0, 1, 2, 3]
    manager.check([table])


def test_exactly_the_needed_blocks_are_evicted() -> None:
    """The cache is full; one block more than is blank evicts one cached block, the tail of the oldest chain."""
    manager = BlockManager(6, B)
    use(manager, tokens(1, 2))
    use(manager, tokens(3, 4))
    blank = Owner(manager, tokens(5, 6, 7)).admit()  # two blank blocks and one evicted
    assert num_hits(manager, tokens(1, 2, 9)) == 1, "the head of the oldest chain outlives its tail"
    assert num_hits(manager, tokens(3, 4, 9)) == 2
    manager.check([blank.table])


def test_blank_blocks_are_reused_before_cached_ones() -> None:
    manager = BlockManager(6, B)
    use(manager, tokens(1, 2, 3))
    for i in range(20):
        # Never written (as after an abort), so of no value when released.
        Owner(manager, tokens(50 + i, 51 + i, 52 + i)).admit().release()
        manager.check([])
    assert num_hits(manager, tokens(1, 2, 3, 4)) == 3


def test_a_partly_filled_tail_block_is_blank() -> None:
    manager = BlockManager(4, B)
    use(manager, tokens(1, 2)[:-1])
    Owner(manager, tokens(7, 8, 9)).admit().release()
    assert num_hits(manager, tokens(1, 2)) == 1


def test_the_least_recently_used_chain_goes_first_and_its_tail_before_its_head() -> None:
    manager = BlockManager(9, B)
    for name in (1, 2, 3):
        use(manager, tokens(10 * name, 10 * name + 1, 10 * name + 2))
    use(manager, tokens(10, 11, 12))  # chain 1 is used again: now 2 is the oldest
    remaining = dict.fromkeys((1, 2, 3), 3)
    held: list[list[int]] = []
    for expected in (2, 2, 2, 3, 3, 3, 1, 1, 1):
        held.append(manager.allocate(1))
        remaining[expected] -= 1
        for name, count in remaining.items():
            chain = tokens(10 * name, 10 * name + 1, 10 * name + 2, 99)
            assert num_hits(manager, chain) == count, f"after evicting for {expected}"
        manager.check(held)


def test_identical_content_written_twice_is_indexed_once_and_survives_the_loser() -> None:
    manager = BlockManager(10, B)
    first, second = Owner(manager, tokens(1, 2)).admit(), Owner(manager, tokens(1, 2)).admit()
    assert not set(first.table) & set(second.table)
    first.write()
    second.write()
    manager.check([first.table, second.table])
    winner = list(first.table)
    second.release()
    manager.check([first.table])
    first.release()
    manager.check([])
    # The loser's blocks are blank: with 6 never used, 8 allocations leave the winner's alone.
    held = manager.allocate(8)
    assert not set(held) & set(winner)
    assert manager.match_prefix(tokens(1, 2, 3), CachedPrefix(), b"") == winner
    manager.check([held])


def test_release_of_the_winner_first_keeps_its_content() -> None:
    manager = BlockManager(10, B)
    first, second = Owner(manager, tokens(1, 2)).admit(), Owner(manager, tokens(1, 2)).admit()
    first.write()
    second.write()
    first.release()
    second.release()
    manager.check([])
    assert num_hits(manager, tokens(1, 2, 3)) == 2


# --- Hashes ------------------------------------------------------------------------------------------------------


def test_the_hash_depends_on_parent_tokens_and_key_and_is_128_bits() -> None:
    base = hash_block(b"p", b"t", b"k")
    assert len(base) == 16
    others = [
        hash_block(b"q", b"t", b"k"), hash_block(b"p", b"u", b"k"), hash_block(b"p", b"t", b"l"),
        hash_block(b"", b"pt", b"k"), hash_block(b"pt", b"", b"k"), hash_block(b"p", b"", b"kt"),
        hash_block(b"p", b"kt", b""), hash_block(b"", b"t", b"pk"),
    ]  # fmt: skip
    assert len({base, *others}) == len(others) + 1
    assert hash_block(b"p", b"t", b"k") == base


COLLISIONS = {
    "constant": lambda parent, tokens, cache_key: b"same",
    "ignores the parent": lambda parent, tokens, cache_key: tokens,
    "ignores the tokens": lambda parent, tokens, cache_key: bytes([len(parent) % 256]) + cache_key,
    "ignores the key": lambda parent, tokens, cache_key: bytes(parent[:8]) + tokens,
    "one bit": lambda parent, tokens, cache_key: bytes([sum(tokens) & 1]),
}


@pytest.mark.parametrize("kind", COLLISIONS)
def test_a_collision_costs_a_miss_and_never_a_wrong_hit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "hash_block", COLLISIONS[kind])
    manager = BlockManager(40, B)
    contents: dict[int, tuple[bytes, list[int]]] = {}  # block to (key, the whole prefix that it was written for)
    rng = random.Random(0)
    owners: list[Owner] = []
    chains = [(1, 2), (3, 2), (1, 4), (1, 2, 5), (3, 2, 5), (6, 2, 5), (2, 1)]
    for _ in range(600):
        if owners and (rng.random() < 0.5 or len(owners) == 6):
            owners.pop(rng.randrange(len(owners))).release()
        else:
            owner = Owner(manager, [*tokens(*rng.choice(chains)), 77], rng.choice([b"", b"x"])).admit()
            for i in range(owner.num_hit):
                assert contents[owner.table[i]] == (owner.cache_key, owner.token_ids[: (i + 1) * B])
            for i in range(owner.num_hit, len(owner.table)):
                contents[owner.table[i]] = (owner.cache_key, owner.token_ids[: (i + 1) * B])
            owners.append(owner.write())
        manager.check([owner.table for owner in owners])
    for owner in owners:
        owner.release()
    manager.check([])
    assert manager.num_free_blocks == 40


def test_a_waiting_prompt_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking again (waiting, preempted) hashes nothing; a token more hashes the block that it completes."""
    calls = [0]

    def counting(parent: bytes, tokens: bytes, cache_key: bytes) -> bytes:
        calls[0] += 1
        return hash_block(parent, tokens, cache_key)

    monkeypatch.setattr(block_manager, "hash_block", counting)
    manager = BlockManager(600, B)
    prompt = list(range(500 * B + 1))
    owner = Owner(manager, prompt).admit().write()
    assert calls[0] == 500
    owner.release()
    for _ in range(50):
        assert len(manager.match_prefix(owner.token_ids, owner.prefix, b"")) == 500
    assert calls[0] == 500
    owner.token_ids += range(B)
    assert len(manager.match_prefix(owner.token_ids, owner.prefix, b"")) == 500
    assert calls[0] == 501
    # A prompt that is not in the index is hashed up to its first miss only.
    stranger = CachedPrefix()
    for _ in range(50):
        manager.match_prefix([-1, *prompt], stranger, b"")
    assert calls[0] == 502


def test_comparing_prefixes_of_a_hit_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of a hit is confirmed against its own tokens, not against the whole chain again."""
    manager = BlockManager(600, B)
    prompt = list(range(500 * B + 1))
    use(manager, prompt)
    compared = [0]
    real = block_manager.PrefixNode.__getattribute__

    def counting(self: block_manager.PrefixNode, name: str) -> object:
        compared[0] += name == "tokens"
        return real(self, name)

    monkeypatch.setattr(block_manager.PrefixNode, "__getattribute__", counting)
    assert num_hits(manager, prompt) == 500
    assert 500 <= compared[0] <= 4 * 500


def test_random_admissions_and_releases_conserve_the_pool_and_hit_what_a_model_of_it_says() -> None:
    """Thousands of operations against a plain model: which prefix each block was last written for."""
    rng = random.Random(1)
    for num_blocks, caching in ((12, True), (30, True), (12, False)):
        manager = BlockManager(num_blocks, B, caching)
        written: dict[int, list[int]] = {}  # block to the whole prefix that it holds, once it is written
        owners: list[Owner] = []
        num_hit_blocks = 0
        for _ in range(4000):
            if owners and rng.random() < 0.5:
                owners.pop(rng.randrange(len(owners))).release()
            else:
                prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * B))]
                cached = manager.match_prefix(prompt, CachedPrefix(), b"")
                assert len(cached) <= (len(prompt) - 1) // B
                for i, block in enumerate(cached):
                    assert written[block] == prompt[: (i + 1) * B]
                if caching:
                    longest = 0
                    while longest < (len(prompt) - 1) // B and prompt[: (longest + 1) * B] in written.values():
                        longest += 1
                    assert len(cached) == longest
                if manager.can_allocate(manager.num_blocks_for(len(prompt)) - len(cached), cached):
                    owner = Owner(manager, prompt).admit()
                    num_hit_blocks += owner.num_hit
                    for block in owner.table[owner.num_hit :]:
                        written.pop(block, None)
                    if rng.random() < 0.8:
                        owner.write()
                        for i in range(owner.num_hit, len(prompt) // B):
                            if prompt[: (i + 1) * B] not in written.values() and caching:
                                written[owner.table[i]] = prompt[: (i + 1) * B]
                    owners.append(owner)
            manager.check([owner.table for owner in owners])
            in_use = {block for owner in owners for block in owner.table}
            assert manager.num_free_blocks == num_blocks - len(in_use)
        assert (num_hit_blocks > 200) == caching
