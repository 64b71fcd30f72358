"""Delta nets whose channels decay apart, on a GPU."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.channel_delta.gpu.channels import keyed, normed
from tandem.mechanisms.channel_delta.gpu.verify import verify
from tandem.mechanisms.channel_delta.torch import ChannelGates, ChannelState, ChannelWeights
from tandem.mechanisms.recurrence.gpu.folds import GpuStateUpdates, answer_prompts, answered, is_alone


class GpuChannelStateUpdates(GpuStateUpdates):
    """`ChannelStateUpdates`, with rows of draft tokens as sequences of their own: neighbours of one slot."""

    def corrected(
        self, mixed: Tensor, gates: ChannelGates, step: StepContext, state: ChannelState, weights: ChannelWeights
    ) -> Tensor:
        if step.batch.state_lens is None:
            answers = answered(keyed(mixed, gates, weights), step.batch, state.memory)
        else:
            answers = _answers_with_drafts(mixed.contiguous(), gates, step, state, weights)
        return normed(answers, gates.behind, step.rows.copied if is_alone(step.batch, answers) else None, weights)


def _answers_with_drafts(
    mixed: Tensor, gates: ChannelGates, step: StepContext, state: ChannelState, weights: ChannelWeights
) -> Tensor:
    """Answers of all rows [T, H, D], of which those that decode may be draft tokens, or follow some."""
    batch, sequences, dim = step.batch, len(step.batch.seq_lens), len(weights.norm)
    gates = gates._replace(forget=gates.forget.contiguous())
    answers = mixed.new_empty((len(mixed), len(weights.decay), dim))
    single = sequences if is_alone(batch, answers) else batch.single_rows
    if single:
        verify(mixed, gates, batch, range(single), state, weights, answers)
    if single < sequences:
        verify(mixed, gates, batch, range(single, sequences), state, weights, answers, before=True)
        answer_prompts(keyed(mixed, gates, weights), batch, single, state.memory, answers)
    return answers


def bound(ops: object, shape: object) -> GpuChannelStateUpdates:
    return GpuChannelStateUpdates()
