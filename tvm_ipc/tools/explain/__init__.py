# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc explain`: report what the pipeline does to a module, as a page or in the terminal.

options                      the command line
command                      the steps of the command
load_module                  modules from files
memory_plan_chart_layout     coordinates of a memory plan
transfer_tracks_and_overlap  overlap of transfers and kernels
summary_sentences            sentences for both reports
text_report                  the report for the terminal
html_page                    the report as a page
memory_plan_svg              a memory plan as SVG
timeline_svg                 transfers and kernels as SVG

`tvm_ipc.tools.inspection` runs the pipeline and collects the facts.
"""
