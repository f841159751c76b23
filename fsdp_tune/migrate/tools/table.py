"""The tools whose files are imported, by name. `recipe.read.tool_detection` has the keys that tell them."""

from __future__ import annotations

from fsdp_tune.migrate.tool import Tool
from fsdp_tune.migrate.tools import automodel, axolotl, llama_factory, soup, torchtune, unsloth
from fsdp_tune.migrate.tools.accelerate_config import ACCELERATE_TOOL
from fsdp_tune.migrate.tools.deepspeed import DEEPSPEED_TOOL
from fsdp_tune.migrate.tools.fms_hf_tuning import FMS_TOOL
from fsdp_tune.migrate.tools.run_clm import EXAMPLE_TOOL
from fsdp_tune.migrate.tools.swift import SWIFT_TOOL
from fsdp_tune.migrate.tools.trl import TRL_TOOL

TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        *(axolotl.TOOL, TRL_TOOL, EXAMPLE_TOOL, llama_factory.TOOL, SWIFT_TOOL, torchtune.TOOL),
        *(ACCELERATE_TOOL, DEEPSPEED_TOOL, unsloth.TOOL, automodel.TOOL, soup.TOOL, FMS_TOOL),
    )
}
