"""Decoders of transformers, by the placement of their norms; of those that equal one model of ours, only one."""

from support.architectures.output_norms import OUTPUT_NORMS
from support.architectures.parallel import PARALLEL
from support.architectures.post import POST
from support.architectures.pre_extra_norms import PRE_EXTRA_NORMS
from support.architectures.pre_layer_norm import PRE_LAYER_NORM
from support.architectures.pre_rms_norm import PRE_RMS_NORM
from support.architectures.recipes import RECIPES

ARCHITECTURES = [*PRE_RMS_NORM, *PRE_LAYER_NORM, *PRE_EXTRA_NORMS, *POST, *OUTPUT_NORMS, *PARALLEL, *RECIPES]
