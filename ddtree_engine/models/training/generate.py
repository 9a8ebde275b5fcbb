"""Continuations by the target itself, many at once: what the drafter is trained on."""

from __future__ import annotations

import torch

from .network import TargetNetwork, rope_tables, stack
from .shapes import END

GREEDY_SHARE, TEMPERATURE = 0.7, 0.7


def temperatures(count: int, generator: torch.Generator) -> torch.Tensor:
    """[count]: 0 for the greedy share, the sampling temperature for the rest."""
    draw = torch.rand(count, generator=generator, device=generator.device)
    return torch.where(draw < GREEDY_SHARE, 0.0, TEMPERATURE)


@torch.no_grad()
def generate(
    target: TargetNetwork, prompts: torch.Tensor, length: int, temperature: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """prompts [batch, p], temperature [batch] -> [batch, length] int64, prompts included."""
    pair = target.pair
    (batch, start), device = prompts.shape, prompts.device
    dtype = target.embed_tokens.weight.dtype
    tables = rope_tables(pair, length, device)
    shape = (pair.layers, 2, batch, length, pair.kv_heads, pair.head_dim)
    cache = torch.empty(shape, dtype=dtype, device=device)
    out = torch.empty(batch, length, dtype=torch.int64, device=device)
    out[:, :start] = prompts

    def forward(ids: torch.Tensor, at: int) -> torch.Tensor:
        x, end = target.embed_tokens(ids), at + ids.shape[1]
        here = (tables[0][at:end], tables[1][at:end])
        for number, layer in enumerate(stack(target.layers)):
            hidden, attention = layer.input_layernorm(x), layer.self_attn
            cache[number, 0, :, at:end], cache[number, 1, :, at:end] = attention.keys_values(hidden, here)
            keys, values = cache[number, 0, :, :end], cache[number, 1, :, :end]
            # Either the whole prompt, with nothing before it, or one token that sees everything.
            x = x + attention.mix(attention.queries(hidden, here), keys, values, None, causal=at == 0)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return target.logits(target.norm(x[:, -1])).float()

    logits = forward(prompts, 0)
    special = torch.arange(END + 1, END + 4, device=device)
    for position in range(start, length):
        logits[:, special] = float("-inf")  # chat marks and the mask do not occur in the corpus
        uniform = torch.rand(logits.shape, generator=generator, device=device).clamp_(1e-9, 1 - 1e-9)
        gumbel = -torch.log(-torch.log(uniform))
        sampled = (logits / temperature.clamp(min=1e-3)[:, None] + gumbel).argmax(-1)
        out[:, position] = torch.where(temperature > 0, sampled, logits.argmax(-1))
        if position + 1 < length:
            logits = forward(out[:, position : position + 1], position)
    return out
