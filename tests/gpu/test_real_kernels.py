"""The kernel tests of the unit suite, which run on the host there, repeated on a real GPU."""

import pytest
from unit.models.layers.test_gpu_attention import (
    test_gpu_attention_in_documents_matches_the_formula,
    test_gpu_attention_matches_the_formula,
    test_gpu_attention_with_windows_matches_the_formula,
    test_head_size_without_kernel_is_rejected,
    test_non_finite_row_does_not_affect_earlier_rows,
)
from unit.models.layers.test_gpu_kernels import (
    test_activation_kernels_match_the_formula,
    test_activation_kernels_of_huge_numbers_are_finite,
    test_bad_logits_and_targets_stay_visible,
    test_column_sums_match_the_formula,
    test_cross_entropy_kernels_match_the_formula,
    test_in_place_sums_match_the_formula,
    test_norm_kernels_match_the_formula,
    test_rotary_kernels_match_the_formula,
    test_swiglu_kernels_match_the_formula,
    test_table_row_kernels_match_the_formula,
)

__all__ = [
    "test_activation_kernels_match_the_formula",
    "test_activation_kernels_of_huge_numbers_are_finite",
    "test_bad_logits_and_targets_stay_visible",
    "test_column_sums_match_the_formula",
    "test_cross_entropy_kernels_match_the_formula",
    "test_gpu_attention_in_documents_matches_the_formula",
    "test_gpu_attention_matches_the_formula",
    "test_gpu_attention_with_windows_matches_the_formula",
    "test_head_size_without_kernel_is_rejected",
    "test_in_place_sums_match_the_formula",
    "test_non_finite_row_does_not_affect_earlier_rows",
    "test_norm_kernels_match_the_formula",
    "test_rotary_kernels_match_the_formula",
    "test_swiglu_kernels_match_the_formula",
    "test_table_row_kernels_match_the_formula",
]


@pytest.fixture
def gpu(cupy):
    """The real cupy in the place of the double of the unit suite."""
    return cupy
