# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc doctor`: report which features work on this machine, and what to do for the others.

command                       the command line
facts                         every check, as a dictionary (`--json`)
feature_readiness_and_advice  what is ready, and what to do for the rest
format_facts_as_text          the verdict and the facts, as text
cxx_compiler                  the check of the C++ compiler
gpus                          the checks of CUDA and of GPU pairs
multi_node_check              the check of several machines (`--hosts`)
network_probes_in_workers     the code that runs in their workers
"""
