# SPDX-License-Identifier: Apache-2.0
"""Sharding rules: how operators propagate placements from operands to results.

axis_label_rule                the class of a rule, and the placements that operands need for it
operation                      a call in the form that rules read
user_rules_in_einsum_notation  rules that users write as text
elementwise                    elementwise operators
matmul_attention               matmul, einsum and attention
reductions_sorts_and_scans     sums, means and other reductions; sorts, scans and searches
normalizations                 softmax and normalizations
primfunc                       PrimFuncs that `call_tir` calls, from the indices of their buffers
reshape                        axes that stay sharded when a tensor is reshaped
data_movement                  operators that move elements: concat, split, slices, broadcasts,
                               padding
experts                        mixtures of experts
gather_scatter                 operators that take or write elements by index
convolution_pooling_resize     convolutions, pooling and resizing
decompose_along_sharded_axis   operators as several simpler ones, for axes that are sharded
operator_rule_table            the rule of each operator, and rules that users declare
"""
