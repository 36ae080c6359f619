# SPDX-License-Identifier: Apache-2.0
"""What several passes stand on.

program  the bindings of a function in order, its if branches as regions of them
aliases  which memory a value may be, who else holds it, and where it is used
"""
