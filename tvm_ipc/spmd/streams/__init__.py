# SPDX-License-Identifier: Apache-2.0
"""Axes that `R.comm.place(..., stream=axis)` marks: operators and collectives in chunks.

split_at_marks        the entry: for each mark of a function, the schedule that supports it
split_marked_regions  the replacement of the regions of marks by bindings of chunks
find_marked_region    the operators and collectives that are computed chunk by chunk
pipelined_chunks      a chunk for each index along the marked axis, several at a time
ring_of_chunks        a chunk for each rank, sent by each rank to one other at a time
emit_chunk            the bindings of a chunk: slices, operators, asynchronous requests
compute_on_streams    the regions whose chunks are computed on several streams of a GPU
marked_work           what a region computes and communicates, for the cost model
"""
