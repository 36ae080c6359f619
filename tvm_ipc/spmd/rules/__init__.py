# SPDX-License-Identifier: Apache-2.0
"""Sharding rules: how operators propagate placements from operands to results.

axis_label_rule                the class of a rule, and the placements that operands need for it
operation                      a call in the form that rules read
user_rules_in_einsum_notation  rules that users write as text
elementwise                    elementwise operators
matmul_attention               matmul, einsum and attention
reductions                     sums, means and other reductions
normalizations                 softmax and normalizations
reshape                        axes that stay sharded when a tensor is reshaped
data_movement                  operators that move elements: concat, split, slices, broadcasts,
                               padding
gather_scatter                 operators that take or write elements by index
sort_scan_and_search           sort, scan, search in sorted boundaries, and argmax
convolution_pooling_resize     convolutions, pooling and resizing
decompose_along_sharded_axis   operators as several simpler ones, for axes that are sharded
operator_rule_table            the rule of each operator, and rules that users declare
"""
