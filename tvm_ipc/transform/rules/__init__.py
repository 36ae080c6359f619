# SPDX-License-Identifier: Apache-2.0
"""What operators do to the axes of tensors, and what of it follows for placements.

rule         what a rule is, and where operands have to be for it
operation    a call as rules see it
spelled      rules that are written as text
elementwise  operators element by element
products     matrix products, einsum, attention
reductions   sums, means and the like
norms        softmax and normalizations
reshape      axes that stay divided when a tensor is reshaped
moving       operators that move elements: concat, split, slices, broadcasts, padding
keeps        when results are partial as operands are
indexing     operators that take elements by index, and those that work along an axis
images       convolutions, pooling, resizing
composed     operators as several simpler ones, for axes of which no rank has all
table        the rule of each operator, and rules that users add
"""
