"""Range arithmetic: exhaustively for small cases, and by properties."""

from hypothesis import given
from hypothesis import strategies as st

from hpcdist.arrays.ranges import Range, align_up, cut, split


def test_split_gives_aligned_balanced_parts_for_small_cases():
    for itemsize in (1, 2, 4, 8):
        block = 64 // itemsize
        for size in [*range(70), 1000, 1023]:
            for parts in range(1, 9):
                ranges = split(size, parts, itemsize)
                assert len(ranges) == parts
                assert ranges[0].start == 0 and ranges[-1].stop == size
                assert all(a.stop == b.start for a, b in zip(ranges, ranges[1:], strict=False))
                assert all(r.start % block == 0 for r in ranges if r)
                blocks = [-(-r.size // block) for r in ranges]
                assert max(blocks) - min(blocks) <= 1, (size, parts, itemsize, ranges)
                assert blocks == sorted(blocks, reverse=True), "the first parts must be the longest"


def test_split_with_fewer_blocks_than_parts_leaves_last_parts_empty():
    assert [r.size for r in split(20, 4, 4)] == [16, 4, 0, 0]
    assert [r.size for r in split(0, 3, 4)] == [0, 0, 0]


@given(st.integers(0, 10**12), st.integers(1, 4096), st.sampled_from([1, 2, 4, 8]))
def test_split_supports_sizes_beyond_32_bits(size, parts, itemsize):
    ranges = split(size, parts, itemsize)
    assert sum(r.size for r in ranges) == size
    assert max(r.size for r in ranges) - min(r.size for r in ranges) < 2 * max(1, 64 // itemsize)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_intersection_matches_set_intersection(a, n, b, m):
    one, other = Range(a, a + n), Range(b, b + m)
    assert set(range(one.start, one.stop)) & set(range(other.start, other.stop)) == set(
        range(one.intersect(other).start, one.intersect(other).stop)
    )


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 50))
def test_cut_covers_the_range_in_order(start, size, longest):
    parts = list(cut(Range(start, start + size), longest))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(start, start + size))
    assert all(0 < part.size <= longest for part in parts)


def test_align_up():
    assert [align_up(n, 32) for n in (0, 1, 32, 33)] == [0, 32, 32, 64]
