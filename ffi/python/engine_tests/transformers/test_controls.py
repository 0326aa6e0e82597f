"""Faults that the comparisons must notice: a wrong byte in the total pool, and a crop that is off by one."""

from __future__ import annotations

import pytest
import torch
from forebay import ForebayError
from forebay.transformers import ForebayCache, check, models
from harness import FAMILIES, forward, model

CONTEXT, STEPS = 96, 12


def decoded(of: torch.nn.Module, cache: ForebayCache, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the given tokens, one by one."""
    return torch.cat([forward(of, tokens[:, at : at + 1], cache) for at in range(tokens.shape[1])], dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_control_one_byte_of_the_total_pool_changes_the_output(family: str) -> None:
    """One byte of one row of layer 0 is changed after the prefill, in a run of its own for each of some positions. A
    position that no step selects changes nothing, but half of them must. Without a change nothing differs."""
    of, tokens = model(family), models.prompts(1, CONTEXT + STEPS, seed=1)
    positions = range(3, CONTEXT, CONTEXT // 6)

    def run(position: int | None) -> torch.Tensor:
        with ForebayCache(of.config, ratio=0.2, max_tokens=CONTEXT + STEPS) as cache:
            forward(of, tokens[:, :CONTEXT], cache)
            if position is not None:
                page, row = divmod(position, cache.forebay.rows(0).shape[1])
                # The exponent of the second value (of the fourth with two bytes a value).
                cache.forebay.rows(0)[page, row, 7] ^= 0x40
            logits = decoded(of, cache, tokens[:, CONTEXT:])
            cache.validate()
            return logits

    right = run(None)
    assert check.same_bits(right, run(None))
    changed = sum(not check.same_bits(right, run(position)) for position in positions)
    assert changed >= len(positions) // 2


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_control_a_crop_that_is_off_by_one_is_noticed(
    family: str, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected drafts: one row too many or too few goes, in forebay's request alone, and in the whole cache. In the
    request alone an error is as good as other logits; the whole cache stays consistent, so only the logits tell."""
    from forebay.serving import Request

    of, tokens = model(family), models.prompts(1, CONTEXT + STEPS, seed=2)
    drafts = models.prompts(1, 3, seed=3)

    def run() -> torch.Tensor:
        with ForebayCache(of.config, ratio=0.3, max_tokens=CONTEXT + 2 * STEPS + 8, drafts=3) as cache:
            # The sliding layers of dots3_note keep what they need for a crop only when asked.
            cache.activate_past_recording()
            forward(of, tokens[:, :CONTEXT], cache)
            logits = []
            for at in range(CONTEXT, CONTEXT + STEPS):
                logits.append(forward(of, torch.cat([tokens[:, at : at + 1], drafts], dim=1), cache))
                cache.crop(-3)
            return torch.cat(logits, dim=1)

    right = run()
    assert check.same_bits(right, run())
    whole, crop = ForebayCache.crop, Request.crop
    with monkeypatch.context() as planted:
        planted.setattr(ForebayCache, "crop", lambda cache, count: whole(cache, count + by))
        assert not check.same_bits(right, run())
    monkeypatch.setattr(Request, "crop", lambda request, length: crop(request, length + by))
    try:
        wrong = run()
    except (ForebayError, ValueError, RuntimeError):
        return
    assert not check.same_bits(right, wrong)
