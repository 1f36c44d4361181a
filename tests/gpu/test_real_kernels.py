"""The kernels on a real GPU: the tests of the unit suite, which run them on the host, once more."""

import pytest
from unit.models.layers.test_gpu_attention import (
    test_against_the_formula,
    test_documents_against_the_formula,
    test_heads_that_no_kernel_has_are_refused,
    test_what_is_not_finite_shows_in_its_row_and_in_no_earlier_one,
    test_windows_against_the_formula,
)
from unit.models.layers.test_gpu_kernels import (
    test_activations,
    test_activations_of_huge_numbers,
    test_column_sums,
    test_cross_entropy,
    test_norms,
    test_rotary_positions,
    test_rows_of_a_table,
    test_sums_in_place,
    test_swiglu,
    test_what_is_wrong_with_logits_and_targets_shows,
)

__all__ = [
    "test_activations",
    "test_activations_of_huge_numbers",
    "test_against_the_formula",
    "test_column_sums",
    "test_cross_entropy",
    "test_documents_against_the_formula",
    "test_heads_that_no_kernel_has_are_refused",
    "test_norms",
    "test_rotary_positions",
    "test_rows_of_a_table",
    "test_sums_in_place",
    "test_swiglu",
    "test_what_is_not_finite_shows_in_its_row_and_in_no_earlier_one",
    "test_what_is_wrong_with_logits_and_targets_shows",
    "test_windows_against_the_formula",
]


@pytest.fixture
def gpu(cupy):
    """Where the unit suite has the double, the real thing."""
    return cupy
