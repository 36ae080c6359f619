# SPDX-License-Identifier: Apache-2.0
"""Format an explanation as JSON, for `tvm-ipc explain --json`; docs/passes.md lists the fields."""

from __future__ import annotations

import json
from dataclasses import asdict

from tvm_ipc.tools.inspection.run_pipeline_for_explanation import Explanation


def render(explanation: Explanation) -> str:
    """Return the headline figures, the memory plan and the decisions as a JSON object."""
    question, figures = explanation.question, explanation.figures
    content = {
        "source": question.source,
        "target": question.target,
        "workers": question.world_size,
        "strategy": question.strategy,
        "sizes": explanation.sizes,
        "collectives": [asdict(entry) for entry in figures.collectives],
        "parameters": [asdict(entry) for entry in figures.parameters],
        "estimates": [asdict(entry) for entry in figures.estimates],
        "memory": {
            function: {
                "plan": memory.ours,
                "tvm_plan": memory.upstream,
                "lower_bound": memory.least,
                "results": memory.results,
            }
            for function, memory in explanation.memory.items()
        },
        "decisions": [asdict(decision) for decision in explanation.report.decisions],
    }
    return json.dumps(content, indent=2)
