"""The backend `null`: fixed tokens, for measurements of what surrounds a model."""

from __future__ import annotations

import pytest
from cells import toy

from crucible.engine.backend import NO_TOKEN, PlanError, SlotSpec, StepPlan, decode, prefill
from crucible.engine.backends import make_backend, resolve_backend
from crucible.engine.engine import Engine, Event
from crucible.engine.null import NullBackend
from crucible.engine.request import SamplingParams

CONFIG = toy(vocab_size=67, max_position_embeddings=96)
IDS = (40, 7, 7, 12)


def serve(engine: Engine, **requests: SamplingParams) -> dict[str, list[Event]]:
    for name, params in requests.items():
        engine.add(name, [1, 2, 3], params)
    events: dict[str, list[Event]] = {name: [] for name in requests}
    while engine.has_work:
        for event in engine.step():
            events[str(event.request_id)].append(event)
    return events


@pytest.mark.parametrize("look_ahead", [0, 2])
def test_each_request_draws_the_same_cycle_and_ends_at_its_limit(look_ahead: int) -> None:
    backend = make_backend("null", CONFIG, {}, num_slots=2, null_ids=IDS)
    engine = Engine(backend, eos_ids=(7,), look_ahead=look_ahead)
    events = serve(
        engine,
        free=SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.3, seed=5),
        kept=SamplingParams(max_tokens=3),
        last=SamplingParams(max_tokens=93, stop_token_ids=[12]),
    )
    tokens = {name: [event.token_id for event in its] for name, its in events.items()}
    assert tokens == {"free": [40, 7, 7, 12, 40, 7], "kept": [40, 12, 40], "last": [40] * 93}
    assert {its[-1].finish for its in events.values()} == {"length"}
    assert engine.stats.free_pages == backend.num_pages == 12


def test_what_would_all_end_a_request_is_drawn_all_the_same() -> None:
    events = serve(Engine(NullBackend(CONFIG, IDS), eos_ids=IDS), a=SamplingParams(max_tokens=3))
    assert [event.token_id for event in events["a"]] == [40, 7, 7]


def test_scores_are_there_for_those_who_ask() -> None:
    engine = Engine(NullBackend(CONFIG, IDS, num_slots=2), prefill_chunk=2)
    events = serve(
        engine, a=SamplingParams(max_tokens=2, logprobs=3, prompt_logprobs=True), b=SamplingParams(max_tokens=2)
    )
    assert events["a"][0].prompt_logprobs == (0.0, 0.0)
    for event in events["a"]:
        assert event.logprobs is not None
        assert event.logprobs.top_ids[0] == event.token_id
        assert len(set(event.logprobs.top_ids)) == len(event.logprobs.top_logprobs) == 3
    assert {event.logprobs for event in events["b"]} == {None}


def test_several_steps_in_one_plan_stop_at_the_limit() -> None:
    backend = NullBackend(CONFIG, IDS)
    backend.open_slot(0, SlotSpec(page_table=(0,), limit=6, prompt_ids=(1, 2), params=SamplingParams()))
    assert backend.submit(StepPlan((prefill(0, (1, 2)),))).wait().ids.tolist() == [[40]]
    result = backend.submit(StepPlan((decode(0, 2),), steps=5)).wait()
    assert result.ids[:, 0].tolist() == [7, 7, 12, NO_TOKEN, NO_TOKEN]
    assert (result.counts.tolist(), result.finish) == ([3], ("length",))


def test_it_is_asked_for_by_name_and_has_no_logits() -> None:
    assert resolve_backend("auto") != "null"
    backend = NullBackend(CONFIG)
    backend.open_slot(0, SlotSpec(page_table=(0,), limit=6, prompt_ids=(1, 2), params=SamplingParams()))
    with pytest.raises(PlanError, match="the null backend has no logits"):
        backend.submit(StepPlan((prefill(0, (1, 2)),), want_logits=True))
